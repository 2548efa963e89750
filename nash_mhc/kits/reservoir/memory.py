"""Memory capacity and effective radius of the first layer of a reservoir, before training.

Memory capacity (Jaeger 2001): feed one channel of independent numbers. The recall of a delay is the squared
correlation of past inputs with the best linear readout of the state. The capacity is the sum over delays, at most the
number of real units. A small ridge stands for the rounding error of states. The effective radius is the factor per
token by which two states with the same input approach each other in the long run.

Linear units have closed forms. Tanh units are simulated, and the recall is measured on held-out time steps. It takes a
few seconds of NumPy at most.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from nash_mhc.kits.reservoir.model import input_matrix, leaks, multipliers, ring_weights
from nash_mhc.kits.reservoir.settings import ReservoirConfig

_RIDGE = 1e-6  # relative to the mean square of a state: about the square of bfloat16's rounding error
_FORGOTTEN = 0.01  # remaining difference of two initial states
_MOST_DIMENSIONS = 1024  # of the state of a linear reservoir; the presets need a fraction of that
_TOLERANCE = 0.05  # units: error of a capacity by truncation
# Simulated tanh units, in whole rings, which are independent. 1,024 units recalled no more than 64, and fitting their
# readout would need many more time steps.
_MOST_SIMULATED = 128
_FITTED, _HELD_OUT = 16384, 8192  # time steps
_MOST_DELAYS = 1024
_MOST_TOKENS = 8192  # of the simulation of forgetting
_ROUNDING = 1e-9  # relative difference of two states below which rounding errors dominate
_BLOCK = 512  # delays or tokens at a time
_SHOWN_DELAYS = 100
_SMALLEST_SHOWN = 0.005  # recall


class Memory(NamedTuple):
    capacity: float | None  # None: states diverge
    units: int  # real units, the upper bound of the capacity
    curve: list[tuple[int, float]]  # (delay, recall)
    radius: float  # effective
    forgets: int | None  # tokens until 1% of the difference of two states is left; None: not within `watched`
    watched: int | None  # simulated tokens; None: closed form, for any number of tokens


@functools.lru_cache(16)
def memory(cfg: ReservoirConfig) -> Memory:
    if cfg.unit == "linear":
        capacity, delays, recall = linear_recall(cfg)
        radius, forgets, watched = _linear_forgetting(cfg)
    else:
        recall_K = measured_recall(cfg)
        capacity, delays = float(np.clip(recall_K.sum(), 0, 2 * cfg.units)), _spaced_delays(len(recall_K))
        recall = recall_K[delays - 1]
        radius, forgets, watched = _tanh_forgetting(cfg)
    shown = 1 + max(np.flatnonzero(recall > _SMALLEST_SHOWN), default=-1)
    curve = [(int(k), round(float(share), 4)) for k, share in zip(delays[:shown], recall, strict=False)]
    return Memory(capacity, 2 * cfg.units, curve, radius, forgets, watched)


def _spaced_delays(most: int) -> np.ndarray:
    return np.unique(np.geomspace(1, most, _SHOWN_DELAYS).round().astype(int))


def channel_input(cfg: ReservoirConfig) -> np.ndarray:
    """Return the input of the units [2, N] from the first channel alone, scaled to the power of all channels."""
    first_2N = np.asarray(jax.jit(lambda: input_matrix(cfg, 0)[0])(), float) * math.sqrt(cfg.width)
    # The root of `ReservoirLayer.driven`.
    return first_2N if cfg.unit == "tanh" else first_2N * np.sqrt(np.maximum(1 - np.abs(multipliers(cfg)) ** 2, 1e-6))


def linear_recall(cfg: ReservoirConfig) -> tuple[float | None, np.ndarray, np.ndarray]:
    """Return (capacity, some delays, the recall of each) of linear units.

    The state is the sum over k of w m^k u(t - k). With its covariance C and the vector c_k of u(t - k) in it, the
    recall is c_k (C + ridge)^-1 c_k. The sum over all k is tr C (C + ridge)^-1, minus that of delay 0, the current
    input.
    """
    m_N, (real_N, imaginary_N) = multipliers(cfg), channel_input(cfg)
    w_N = real_N + 1j * imaginary_N
    delays = _spaced_delays(2**16)
    if np.abs(m_N).max() >= 1:
        return None, delays, np.zeros(len(delays))
    # M = 2N: the real parts, then the imaginary parts.
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
    root_MR = _root(column, squares_M, _TOLERANCE * ridge)
    inner_RR = root_MR.T @ root_MR
    eigenvalues_R = np.linalg.eigvalsh(inner_RR)
    response_MK = np.stack([parts(w_N * m_N**k) for k in [0, *delays]], axis=1)
    within_RK = root_MR.T @ response_MK
    explained_K = np.einsum("rk,rk->k", within_RK, np.linalg.solve(inner_RR + ridge * np.eye(len(inner_RR)), within_RK))
    recall_K = np.clip((np.einsum("mk,mk->k", response_MK, response_MK) - explained_K) / ridge, 0, 1)
    return float(np.sum(eigenvalues_R / (eigenvalues_R + ridge)) - recall_K[0]), delays, recall_K[1:]


def _root(column: Callable[[int], np.ndarray], squares_M: np.ndarray, tolerance: float) -> np.ndarray:
    """Return a low-rank root [M, R] of the covariance, by pivoted Cholesky until the remaining trace is `tolerance`.

    The time scales overlap, so that a few hundred dimensions suffice for thousands of units.
    """
    left_M, most = squares_M.copy(), min(len(squares_M), _MOST_DIMENSIONS)
    root_RM = np.zeros((most, len(squares_M)))
    for r in range(most):
        if left_M.sum() <= tolerance:
            return root_RM[:r].T
        i = int(left_M.argmax())
        root_RM[r] = (column(i) - root_RM[:r, i] @ root_RM[:r]) / math.sqrt(left_M[i])
        left_M = np.maximum(left_M - root_RM[r] ** 2, 0)
    return root_RM.T


def measured_recall(cfg: ReservoirConfig) -> np.ndarray:
    """Simulate the units and return the recall of delays 1, 2, ..., corrected for chance."""
    rng = np.random.default_rng(cfg.reservoir_seed)
    slowest = float(np.max(1 - leaks(cfg) * (1 - cfg.radius)))
    duration = math.log(_FORGOTTEN) / math.log(slowest) if slowest < 1 else math.inf
    delays = math.ceil(min(max(duration, 2 * cfg.units), _MOST_DELAYS))  # a ring has echoes
    u_T = rng.uniform(-math.sqrt(3), math.sqrt(3), delays + _FITTED + _HELD_OUT)
    h_TM = _states(cfg, u_T)[delays:]
    past_TK = np.lib.stride_tricks.sliding_window_view(u_T, delays + 1)[:, -2::-1]  # u(t - 1), u(t - 2), ...
    h_TM -= h_TM[:_FITTED].mean(axis=0)
    h_TM += math.sqrt(_RIDGE * np.mean(h_TM**2)) * rng.standard_normal(h_TM.shape)
    inverse_MM = np.linalg.inv(h_TM[:_FITTED].T @ h_TM[:_FITTED])
    squared_K = np.concatenate([_correlations(h_TM, past_TK[:, k : k + _BLOCK], inverse_MM) for k in range(0, delays, _BLOCK)])
    return squared_K - (1 - squared_K) / _HELD_OUT  # independent series give 1 / steps


def _correlations(h_TM: np.ndarray, past_TK: np.ndarray, inverse_MM: np.ndarray) -> np.ndarray:
    """Return squared correlations [K] of past inputs and readouts, fitted and measured on different time steps."""
    readout_MK = inverse_MM @ (h_TM[:_FITTED].T @ past_TK[:_FITTED])
    read_TK, true_TK = h_TM[_FITTED:] @ readout_MK, past_TK[_FITTED:]
    read_TK, true_TK = read_TK - read_TK.mean(axis=0), true_TK - true_TK.mean(axis=0)
    dot = lambda x_TK, y_TK: np.einsum("tk,tk->k", x_TK, y_TK)
    return dot(read_TK, true_TK) ** 2 / np.maximum(dot(read_TK, read_TK) * dot(true_TK, true_TK), np.finfo(float).tiny)


def _simulated_units(cfg: ReservoirConfig) -> int:
    return min(cfg.units, max(_MOST_SIMULATED // cfg.ring, 1) * cfg.ring)


def _states(cfg: ReservoirConfig, u_T: np.ndarray) -> np.ndarray:
    """Return the states after every token [T, 2 N], starting from zeros."""
    units = _simulated_units(cfg)
    b_2N = channel_input(cfg)[:, :units]
    h_2N, step = np.zeros_like(b_2N), next_state(cfg, units)
    states_T2N = np.empty((len(u_T), 2, units))
    for t, u in enumerate(u_T):
        states_T2N[t] = h_2N = step(h_2N, u * b_2N)
    return states_T2N.reshape(len(u_T), -1)


def next_state(cfg: ReservoirConfig, units: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return (state [..., 2, N], input) -> next state: `model.next_state` of the first tanh units, in NumPy."""
    leak_N, weight_2N = leaks(cfg)[:units], np.asarray(ring_weights(cfg), float)[:, :units]
    numbers = np.arange(units)
    neighbor_N = numbers - 1 + cfg.ring * (numbers % cfg.ring == 0)
    return lambda h, b: (1 - leak_N) * h + leak_N * np.tanh(weight_2N * h[..., neighbor_N] + b)


def _linear_forgetting(cfg: ReservoirConfig) -> tuple[float, int | None, None]:
    """Return (effective radius, tokens to forget, None): the difference of each unit shrinks by |m| per token."""
    sizes_N = np.abs(multipliers(cfg))
    radius = float(sizes_N.max())
    if radius >= 1:
        return radius, None, None
    is_forgotten = lambda tokens: math.sqrt(np.mean(sizes_N ** (2 * tokens))) < _FORGOTTEN
    most = math.ceil(math.log(_FORGOTTEN) / math.log(radius))
    return radius, bisect.bisect_left(range(most), True, key=is_forgotten), None


def _tanh_forgetting(cfg: ReservoirConfig) -> tuple[float, int | None, int]:
    """Return (effective radius, tokens to forget, simulated tokens) of two states with the same inputs."""
    rng = np.random.default_rng(cfg.reservoir_seed)
    units = _simulated_units(cfg)
    input_DM = np.asarray(jax.jit(lambda: input_matrix(cfg, 0)[..., :units])(), np.float32).reshape(cfg.width, -1)
    step, h, distances = next_state(cfg, units), rng.uniform(-1, 1, (2, 2, units)), []
    for _ in range(0, _MOST_TOKENS, _BLOCK):
        tokens_TD = rng.standard_normal((_BLOCK, cfg.width), np.float32)
        for b_2N in (tokens_TD @ input_DM).reshape(_BLOCK, 2, units):
            distances.append(float(np.linalg.norm(h[0] - h[1])))
            h = step(h, b_2N)
        if distances[-1] < _ROUNDING * distances[0]:
            break
    distance_T = np.asarray(distances) / distances[0]
    near = np.flatnonzero(distance_T < _FORGOTTEN)
    exact = distance_T[distance_T >= _ROUNDING]
    half, last = len(exact) // 2, len(exact) - 1  # the second half, when the fast units have forgotten
    radius = float((exact[last] / exact[half]) ** (1 / (last - half)))
    return radius, int(near[0]) if len(near) else None, len(distances)
