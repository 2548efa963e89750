"""Doubly stochastic maps: exact in float32, with the gradient of the limit, in XLA, the GPU kernel and torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops import residual_streams
from nash_mhc.ops.doubly_stochastic import sinkhorn_reference

TOKENS = 79 * 128  # whole blocks of the kernel
KINDS = {
    "N(0, 0.1)": (0, 0.1),
    "N(0, 1)": (0, 1),
    "6 I + N(0, 0.1)": (6, 0.1),
    "6 I + N(0, 1)": (6, 1),
    "10 I + N(0, 1)": (10, 1),
}
EXTREMES = [(4, 8.0, 0.0), (4, 1e4, 0.0), (4, 1.0, 30.0), (4, 0.0, 0.0), (3, 8.0, 0.0), (2, 1.0, 3.0), (5, 1.0, 6.0)]


def logits_of(diagonal, spread, R=4, n=TOKENS, dtype=np.float32):
    """[n, R, R]"""
    return (diagonal * np.eye(R) + spread * np.random.default_rng(0).normal(size=(n, R, R))).astype(dtype)


def in_rows(x_nRR):
    """Maps of one batch row, with pre and post of 0."""
    n, R, _ = x_nRR.shape
    return jnp.concatenate([jnp.zeros((1, n, 2 * R), x_nRR.dtype), jnp.reshape(x_nRR, (1, n, R * R))], axis=-1)


def res_of(maps_BTM, R):
    return maps_BTM[0, :, 2 * R :].reshape(-1, R, R)


@functools.cache
def jax_form(form):
    """logits, weights [n, R, R] -> (the matrices, the gradient of sum(weights * matrices)), compiled once."""
    backward = residual_streams.maps_backward
    forward = residual_streams.maps
    if form == "kernel":
        in_kernel = functools.partial(functools.partial, residual_streams.gpu.maps, interpret=True)
        forward, backward = in_kernel(residual_streams._maps), in_kernel(residual_streams._maps_backward)

    @jax.jit
    def found(logits, weights):
        maps_BTM = forward(in_rows(logits))
        gradient = backward(maps_BTM, in_rows(weights))
        return res_of(maps_BTM, logits.shape[-1]), res_of(gradient, logits.shape[-1])

    return lambda logits, weights: tuple(map(np.asarray, found(logits, weights)))


def torch_form(logits, weights):
    import torch

    from nash_mhc.kits.hub.modeling_nash_mhc import doubly_stochastic

    x = torch.tensor(logits, requires_grad=True)
    p = doubly_stochastic(x)
    (p * torch.tensor(weights)).sum().backward()
    return p.detach().numpy(), x.grad.numpy()


FORMS = {"xla": jax_form("xla"), "kernel": jax_form("kernel"), "torch": torch_form}


def constraints(p):
    """The change of row and column sums by what is added to the logits of rows and columns, [n, 2 R, 2 R]."""
    n, R, _ = p.shape
    system = np.zeros((n, 2 * R, 2 * R))
    system[:, :R, R:], system[:, R:, :R] = p, p.transpose(0, 2, 1)
    sums = np.concatenate([p.sum(2), p.sum(1)], axis=1)
    free = np.concatenate([np.ones(R), -np.ones(R)])  # up with all rows, down with all columns: no change
    return system + sums[:, :, None] * np.eye(2 * R) + free[:, None] * free


def solve(p, sums):
    """(what to add to the rows' logits, to the columns') for such a change of the sums."""
    R, found = p.shape[1], np.linalg.solve(constraints(p), sums[..., None])[..., 0]
    return found[:, :R, None] + found[:, None, R:]


def limit_of(logits):
    """By Sinkhorn rounds, then Newton's method on all sums at once, with a dense solver, in float64."""
    logits = logits.astype(np.float64)
    for _ in range(10):
        logits = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        logits = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    for _ in range(8):
        p = np.exp(logits)
        logits = logits + solve(p, 1.0 - np.concatenate([p.sum(2), p.sum(1)], axis=1))
    p = np.exp(logits)
    np.testing.assert_allclose([p.sum(1), p.sum(2)], 1.0, atol=1e-11)
    return p


def gradient_of_limit(p, g):
    """P * (G - a 1' - 1 b'), with the a and b that leave all sums as they are."""
    g = g.astype(np.float64)
    return p * (g - solve(p, np.concatenate([(p * g).sum(2), (p * g).sum(1)], axis=1)))


@pytest.fixture(scope="module")
def exact():
    """Kind -> (logits, weights, the limit, its gradient), in float64 from float32 numbers."""
    weights = np.random.default_rng(1).normal(size=(TOKENS, 4, 4)).astype(np.float32)
    found = {}
    for kind, (diagonal, spread) in KINDS.items():
        logits = logits_of(diagonal, spread)
        p = limit_of(logits)
        found[kind] = logits, weights, p, gradient_of_limit(p, weights)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_doubly_stochastic_and_has_the_gradient_of_the_limit_for_every_token(kind, form, exact):
    logits, weights, limit, gradient = exact[kind]
    p, got = FORMS[form](logits, weights)
    assert p.dtype == got.dtype == np.float32 and p.min() >= 0.0
    np.testing.assert_allclose([p.sum(1, dtype=np.float64), p.sum(2, dtype=np.float64)], 1.0, atol=2e-6)
    np.testing.assert_allclose(p, limit, atol=5e-6)
    norm = lambda x: np.sqrt(np.sum(np.square(x, dtype=np.float64), axis=(1, 2)))
    assert np.max(norm(got - gradient) / np.maximum(norm(gradient), 0.01 * norm(weights))) <= 1e-4


@pytest.mark.parametrize(("R", "spread", "diagonal"), EXTREMES)
def test_any_logits_give_doubly_stochastic_matrices_and_finite_gradients(R, spread, diagonal):
    n = TOKENS if R == 4 else 64  # the kernel is compiled for four streams and these tokens already
    logits, weights = logits_of(diagonal, spread, R=R, n=n), logits_of(0.0, 1.0, R=R, n=n)
    for name in FORMS if R == 4 else ("xla", "torch"):
        p, gradient = FORMS[name](logits, weights)
        assert np.isfinite(gradient).all() and p.min() >= 0.0
        np.testing.assert_allclose([p.sum(1), p.sum(2)], 1.0, atol=2e-6)
        assert np.linalg.norm(p, 2, axis=(1, 2)).max() <= 1 + 1e-5


@pytest.mark.parametrize(("R", "spread", "diagonal"), [(4, 1.0, 0.0), (4, 0.1, 6.0), (2, 1.0, 3.0), (5, 1.0, 6.0)])
def test_the_gradient_is_that_of_finite_differences(R, spread, diagonal):
    step = 1e-5
    logits = logits_of(diagonal, spread, R=R, n=1, dtype=np.float64)
    weights = logits_of(0.0, 1.0, R=R, n=1, dtype=np.float64)
    bumps = step * np.eye(R * R).reshape(R * R, R, R)
    batch = np.concatenate([logits + bumps, logits - bumps, logits])  # one program for all
    with jax.enable_x64(True):
        p, gradient = FORMS["xla"](batch, np.broadcast_to(weights, batch.shape))
    value = np.sum(p * weights, axis=(1, 2))
    measured = (value[: R * R] - value[R * R : 2 * R * R]) / (2 * step)
    np.testing.assert_allclose(gradient[-1].ravel(), measured, atol=1e-8)


def test_it_is_where_sinkhorn_rounds_converge_to():
    with jax.enable_x64(True):
        logits = logits_of(2.0, 1.0, n=64, dtype=np.float64)
        rounds = jax.jit(functools.partial(sinkhorn_reference, rounds=3000))(jnp.moveaxis(logits, 0, -1))
        np.testing.assert_allclose(np.moveaxis(rounds, -1, 0), FORMS["xla"](logits, logits)[0], atol=1e-10)


def test_the_mean_over_streams_is_kept():
    logits = logits_of(6.0, 1.0, n=128)
    p, _ = FORMS["xla"](logits, logits)
    x = np.random.default_rng(2).normal(size=(128, 4)).astype(np.float32)
    np.testing.assert_allclose(np.einsum("nij,nj->ni", p, x).mean(1), x.mean(1), atol=1e-5)
