"""How much a reservoir remembers and how fast it forgets: of a run's first layer, before anything is trained.

**Memory capacity** (Jaeger 2001). A layer hears one channel of independent numbers. For every delay: how much of what
was heard so long ago can be told from its state by a linear readout, as a squared correlation; and the sum over all
delays, which is at most the number of real units (two for a complex one). A state is read with an error, as its few
bits have one: what would need more of them is no memory. (For the readout, that is a small ridge.)

**Effective radius**: what the difference of two states that hear the same is multiplied by at a token, in the long run.

Of linear units, both are formulas: the squared correlations are those of endlessly many time steps. Of tanh units they
depend on what is heard; they are measured, the correlations on time steps that the readout was not fitted to. All of it
is NumPy, on one core, and takes a few seconds at most.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from nash_mhc.kits.reservoir.model import input_matrix, leaks, multipliers, ring_weights
from nash_mhc.kits.reservoir.settings import ReservoirConfig

_RIDGE = 1e-6  # of the mean square of a state: the square of what rounding it to bfloat16 changes, about
_FORGOTTEN = 0.01  # of the difference of two starts
_MOST_DIMENSIONS = 1024  # of a linear reservoir that are looked at; those of the presets have a fraction of that
_LEFT_OUT = 0.05  # units: how much smaller than it is a capacity may come out
# Tanh units that are watched, in whole rings, which do not hear each other: with 1,024 of them, no more was told than
# with 64, and a readout of so many numbers would need many times the time steps.
_MOST_WATCHED = 128
_FITTED, _HELD_OUT = 16384, 8192  # time steps
_MOST_DELAYS = 1024
_MOST_TOKENS = 8192  # to watch them forget
_TOO_NEAR = 1e-9  # of the difference of two starts: from there on, rounding is what is between them
_BLOCK = 512  # delays or tokens at a time
_SHOWN = 100  # delays
_HARDLY = 0.005  # of an input: delays of which no more is told are not shown


class Memory(NamedTuple):
    capacity: float | None  # None: states grow without end
    units: int  # real ones: the most that the capacity can be
    curve: list[tuple[int, float]]  # some delays, and how much is told of each
    radius: float  # effective
    forgets: int | None  # tokens until 1% is left of the difference of two starts; None: never, as far as was looked
    watched: int | None  # so many tokens; None: forever, by a formula


@functools.lru_cache(16)
def memory(cfg: ReservoirConfig) -> Memory:
    if cfg.unit == "linear":
        capacity, delays, told = told_by_linear_units(cfg)
        radius, forgets, watched = _linear_units_forget(cfg)
    else:
        recalled_K = recalled(cfg)
        capacity, delays = float(np.clip(recalled_K.sum(), 0, 2 * cfg.units)), _some_delays(len(recalled_K))
        told = recalled_K[delays - 1]
        radius, forgets, watched = _tanh_units_forget(cfg)
    shown = 1 + max(np.flatnonzero(told > _HARDLY), default=-1)
    curve = [(int(k), round(float(share), 4)) for k, share in zip(delays[:shown], told, strict=False)]
    return Memory(capacity, 2 * cfg.units, curve, radius, forgets, watched)


def as_dict(cfg: ReservoirConfig) -> dict[str, Any]:
    return memory(cfg)._asdict()


def _some_delays(most: int) -> np.ndarray:
    return np.unique(np.geomspace(1, most, _SHOWN).round().astype(int))


def one_channel(cfg: ReservoirConfig) -> np.ndarray:
    """What its first channel puts into a layer, [2, N]: as loud as all of them together, which a token is."""
    first_2N = np.asarray(jax.jit(lambda: input_matrix(cfg, 0)[0])(), float) * math.sqrt(cfg.width)
    # The root is that of `ReservoirLayer.driven`.
    return first_2N if cfg.unit == "tanh" else first_2N * np.sqrt(np.maximum(1 - np.abs(multipliers(cfg)) ** 2, 1e-6))


def told_by_linear_units(cfg: ReservoirConfig) -> tuple[float | None, np.ndarray, np.ndarray]:
    """(capacity, some delays, how much is told of each).

    The state is the sum over k of w m^k u(t - k). With C its covariance and c_k what u(t - k) has in it, that delay's
    squared correlation is c_k (C + ridge)^-1 c_k, the sum of all is tr C (C + ridge)^-1; delay 0 was only just heard.
    """
    m_N, (real_N, imaginary_N) = multipliers(cfg), one_channel(cfg)
    w_N = real_N + 1j * imaginary_N
    delays = _some_delays(2**16)
    if np.abs(m_N).max() >= 1:
        return None, delays, np.zeros(len(delays))
    # A row for the real part and one for the imaginary part of every unit.
    parts = lambda numbers: np.concatenate([numbers.real, numbers.imag])
    sizes_N = np.abs(w_N) ** 2 / (1 - np.abs(m_N) ** 2)
    turning_N = w_N**2 / (1 - m_N**2)
    squares_M = np.concatenate([(sizes_N + turning_N.real) / 2, (sizes_N - turning_N.real) / 2])

    def column(i: int) -> np.ndarray:
        part, n = divmod(i, cfg.units)
        with_conjugate_N = w_N * w_N[n].conj() / (1 - m_N * m_N[n].conj())
        with_itself_N = w_N * w_N[n] / (1 - m_N * m_N[n])
        return parts((with_conjugate_N + with_itself_N) / 2 if part == 0 else (with_itself_N - with_conjugate_N) / 2j)

    ridge = _RIDGE * squares_M.mean()
    root_MR = _root(column, squares_M, _LEFT_OUT * ridge)
    inner_RR = root_MR.T @ root_MR
    found_R = np.linalg.eigvalsh(inner_RR)
    heard_MK = np.stack([parts(w_N * m_N**k) for k in [0, *delays]], axis=1)
    within_RK = root_MR.T @ heard_MK
    explained_K = np.einsum("rk,rk->k", within_RK, np.linalg.solve(inner_RR + ridge * np.eye(len(inner_RR)), within_RK))
    told_K = np.clip((np.einsum("mk,mk->k", heard_MK, heard_MK) - explained_K) / ridge, 0, 1)
    return float(np.sum(found_R / (found_R + ridge)) - told_K[0]), delays, told_K[1:]


def _root(column: Callable[[int], np.ndarray], squares_M: np.ndarray, left_out: float) -> np.ndarray:
    """[M, R] whose square is that covariance but for a trace of `left_out`: Cholesky's, the largest rows first.

    Time scales overlap: of thousands of units, a few hundred dimensions hold all that can be told apart.
    """
    left_M, most = squares_M.copy(), min(len(squares_M), _MOST_DIMENSIONS)
    root_RM = np.zeros((most, len(squares_M)))
    for r in range(most):
        if left_M.sum() <= left_out:
            return root_RM[:r].T
        i = int(left_M.argmax())
        root_RM[r] = (column(i) - root_RM[:r, i] @ root_RM[:r]) / math.sqrt(left_M[i])
        left_M = np.maximum(left_M - root_RM[r] ** 2, 0)
    return root_RM.T


def recalled(cfg: ReservoirConfig) -> np.ndarray:
    """The squared correlation of each delay, the first is 1 token ago, as measured, less what chance would give."""
    drawn = np.random.default_rng(cfg.reservoir_seed)
    slowest = float(np.max(1 - leaks(cfg) * (1 - cfg.radius)))
    lasts = math.log(_FORGOTTEN) / math.log(slowest) if slowest < 1 else math.inf
    delays = math.ceil(min(max(lasts, 2 * cfg.units), _MOST_DELAYS))  # a ring comes round after as many as it has units
    u_T = drawn.uniform(-math.sqrt(3), math.sqrt(3), delays + _FITTED + _HELD_OUT)
    h_TM = _states(cfg, u_T)[delays:]
    past_TK = np.lib.stride_tricks.sliding_window_view(u_T, delays + 1)[:, -2::-1]  # u(t - 1), u(t - 2), ...
    h_TM -= h_TM[:_FITTED].mean(axis=0)
    h_TM += math.sqrt(_RIDGE * np.mean(h_TM**2)) * drawn.standard_normal(h_TM.shape)
    inverse_MM = np.linalg.inv(h_TM[:_FITTED].T @ h_TM[:_FITTED])
    squared_K = np.concatenate([_found(h_TM, past_TK[:, k : k + _BLOCK], inverse_MM) for k in range(0, delays, _BLOCK)])
    return squared_K - (1 - squared_K) / _HELD_OUT  # of two series that have nothing in common, 1 / steps is expected


def _found(h_TM: np.ndarray, past_TK: np.ndarray, inverse_MM: np.ndarray) -> np.ndarray:
    """Squared correlations [K] of what was heard and what is read: fitted to the first steps, measured on others."""
    readout_MK = inverse_MM @ (h_TM[:_FITTED].T @ past_TK[:_FITTED])
    read_TK, true_TK = h_TM[_FITTED:] @ readout_MK, past_TK[_FITTED:]
    read_TK, true_TK = read_TK - read_TK.mean(axis=0), true_TK - true_TK.mean(axis=0)
    along = lambda x_TK, y_TK: np.einsum("tk,tk->k", x_TK, y_TK)
    return along(read_TK, true_TK) ** 2 / np.maximum(along(read_TK, read_TK) * along(true_TK, true_TK), np.finfo(float).tiny)


def _watched(cfg: ReservoirConfig) -> int:
    """Units, the first ones."""
    return cfg.units if cfg.unit == "linear" else min(cfg.units, max(_MOST_WATCHED // cfg.ring, 1) * cfg.ring)


def _states(cfg: ReservoirConfig, u_T: np.ndarray) -> np.ndarray:
    """After every token, [T, 2 N], from 0."""
    units = _watched(cfg)
    b_2N = one_channel(cfg)[:, :units]
    h_2N, after = np.zeros_like(b_2N), next_state(cfg, units)
    seen_T2N = np.empty((len(u_T), 2, units))
    for t, u in enumerate(u_T):
        seen_T2N[t] = h_2N = after(h_2N, u * b_2N)
    return seen_T2N.reshape(len(u_T), -1)


def next_state(cfg: ReservoirConfig, units: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(state [..., 2, N], what comes in) -> the next state: `reservoir.next_state` of the first units, in NumPy."""
    if cfg.unit == "linear":
        m_N = multipliers(cfg)[:units]

        def turned(h: np.ndarray, b: np.ndarray) -> np.ndarray:
            real, imaginary = h[..., 0, :], h[..., 1, :]
            parts = (m_N.real * real - m_N.imag * imaginary, m_N.real * imaginary + m_N.imag * real)
            return np.stack(parts, axis=-2) + b

        return turned
    leak_N, weight_2N = leaks(cfg)[:units], np.asarray(ring_weights(cfg), float)[:, :units]
    numbers = np.arange(units)
    before_N = numbers - 1 + cfg.ring * (numbers % cfg.ring == 0)
    return lambda h, b: (1 - leak_N) * h + leak_N * np.tanh(weight_2N * h[..., before_N] + b)


def _linear_units_forget(cfg: ReservoirConfig) -> tuple[float, int | None, None]:
    """(effective radius, tokens to forget, None): every unit's difference shrinks by its own |m|, whatever is heard."""
    sizes_N = np.abs(multipliers(cfg))
    radius = float(sizes_N.max())
    if radius >= 1:
        return radius, None, None
    is_forgotten = lambda tokens: math.sqrt(np.mean(sizes_N ** (2 * tokens))) < _FORGOTTEN
    most = math.ceil(math.log(_FORGOTTEN) / math.log(radius))
    return radius, bisect.bisect_left(range(most), True, key=is_forgotten), None


def _tanh_units_forget(cfg: ReservoirConfig) -> tuple[float, int | None, int]:
    """(effective radius, tokens to forget, tokens that were watched): of two states that hear the same tokens."""
    drawn = np.random.default_rng(cfg.reservoir_seed)
    units = _watched(cfg)
    input_DM = np.asarray(jax.jit(lambda: input_matrix(cfg, 0)[..., :units])(), np.float32).reshape(cfg.width, -1)
    after, h, apart = next_state(cfg, units), drawn.uniform(-1, 1, (2, 2, units)), []
    for _ in range(0, _MOST_TOKENS, _BLOCK):
        tokens_TD = drawn.standard_normal((_BLOCK, cfg.width), np.float32)
        for b_2N in (tokens_TD @ input_DM).reshape(_BLOCK, 2, units):
            apart.append(float(np.linalg.norm(h[0] - h[1])))
            h = after(h, b_2N)
        if apart[-1] < _TOO_NEAR * apart[0]:
            break
    apart_T = np.asarray(apart) / apart[0]
    near = np.flatnonzero(apart_T < _FORGOTTEN)
    watched = apart_T[apart_T >= _TOO_NEAR]
    half, last = len(watched) // 2, len(watched) - 1  # at first, the quick units forget, too
    radius = float((watched[last] / watched[half]) ** (1 / (last - half)))
    return radius, int(near[0]) if len(near) else None, len(apart)
