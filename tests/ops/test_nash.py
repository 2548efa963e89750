"""The game: weights on the simplex, a fixed point, the Gram form against squared distances,
gradients that measure true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from sampled import long

from nash_mhc.ops import nash
from nash_mhc.ops.nash import Rules, aggregate, aggregate_reference

B, T, N, H, C = 2, 16, 2, 64, 3  # every scale more is written out against all others


def inputs(dtype=jnp.float32, size=1.0):
    """Scale c is there from token 2^c - 1 on."""
    rng, wide = np.random.default_rng(0), jnp.promote_types(dtype, jnp.float32)
    outs = tuple(jnp.asarray((size * rng.normal(size=(B, T, N, H))).astype(dtype)) for _ in range(C))
    there = [(np.arange(T) + 1 >= 2**c)[None, :, None] for c in range(C)]
    bids = tuple(jnp.asarray(np.where(there[c], rng.normal(size=(B, T, N)), -np.inf).astype(wide)) for c in range(C))
    return outs, bids, jnp.asarray((np.abs(rng.normal(size=N)) + 0.5).astype(wide))


aggregated = jax.jit(aggregate, static_argnums=3)


@pytest.mark.parametrize("aggregation", ["nash", "convex", "mean"])
def test_values_and_gradients_are_those_of_the_definition(aggregation):
    rules = Rules(aggregation, 3)
    with jax.enable_x64(True):
        outs, bids, tau = inputs(jnp.float64)
        probe_y, probe_w = (np.random.default_rng(5).normal(size=shape) for shape in ((B, T, N, H), (C, B, T, N)))

        def all_of(f):
            def loss(args):
                y, w = f(*args, rules)[:2]
                return jnp.sum(probe_y * y) + jnp.sum(probe_w * jnp.stack(w)), (y, w)

            return jax.jit(jax.grad(loss, has_aux=True))((outs, bids, tau))

        (got, results), (want, expected) = all_of(aggregate), all_of(aggregate_reference)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), results, expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), got, want)


def test_the_gradient_is_that_of_finite_differences():
    with jax.enable_x64(True):
        outs, bids, tau = inputs(jnp.float64)
        probe = np.random.default_rng(5).normal(size=(B, T, N, H))
        loss = lambda outs, bids, tau: jnp.sum(probe * aggregate(outs, bids, tau, Rules())[0])
        both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))  # one program for values and gradients
        _, grads = both(outs, bids, tau)
        for seed in range(4):
            rng = np.random.default_rng(seed)
            here = jax.tree.map(np.asarray, (outs, bids, tau))
            way = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape), here)
            ahead, behind = (jax.tree.map(lambda x, d, h=h: x + h * d, here, way) for h in (1e-6, -1e-6))
            measured = (float(both(*ahead)[0]) - float(both(*behind)[0])) / 2e-6
            predicted = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True))
            np.testing.assert_allclose(predicted, measured, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "dtype"),
    [("nash", jnp.float32), ("convex", jnp.bfloat16), *long(("convex", jnp.float32), ("nash", jnp.bfloat16))],
)
def test_the_gpu_kernels_compute_what_xla_does(aggregation, dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles."""
    rules, (outs, bids, tau) = Rules(aggregation, 3), inputs(dtype)
    assert nash.fits_kernel(outs)
    rng = np.random.default_rng(5)
    dy = jnp.asarray(rng.normal(size=(B, T, N, H)), dtype)
    dw = tuple(jnp.asarray(rng.normal(size=(B, T, N)), jnp.float32) for _ in range(C))
    compare = functools.partial(np.testing.assert_allclose, rtol=2**-7 if dtype == jnp.bfloat16 else 2e-5, atol=1e-5)
    wide = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
    want = jax.jit(functools.partial(nash._aggregate_in_xla, rules))(outs, bids, tau)
    got = jax.jit(functools.partial(nash._aggregate_in_kernel, rules, interpret=True))(outs, bids, tau)
    for a, b in zip(wide(got), wide(want), strict=True):
        compare(a, b)
    args = (outs, bids, tau, dy, dw)
    want = jax.jit(functools.partial(nash._backward_in_xla, rules))(*args)
    got = jax.jit(functools.partial(nash._backward_in_kernel, rules, interpret=True))(*args)
    for a, b in zip(wide(got), wide(want), strict=True):
        compare(a, b, atol=2e-5 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_gpu_kernels_are_lowered_for_a_gpu(dtype):
    """As far as that goes without one: Triton's dialect takes every operation of theirs."""
    outs, bids, tau = inputs(dtype)
    check = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    # From jax 0.11 on, Triton asks for the device.
    gpu = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu"))

    def lower(f, *args):
        with jax.sharding.use_abstract_mesh(gpu):
            return export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[check])(*args).mlir_module()

    forward, backward = (functools.partial(f, Rules()) for f in (nash._aggregate_in_kernel, nash._backward_in_kernel))
    assert 'name = "nash_forward"' in lower(forward, outs, bids, tau)
    assert 'name = "nash_backward"' in lower(backward, outs, bids, tau, outs[0], bids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_weights_lie_on_the_simplex_and_absent_scales_have_none(dtype):
    outs, bids, tau = inputs(dtype)
    _, w, _ = aggregated(outs, bids, tau, Rules())
    w, there = np.stack(w), np.stack(bids) > -np.inf
    np.testing.assert_allclose(w.sum(axis=0), 1.0, atol=1e-6)
    assert (w[~there] == 0.0).all()
    assert (w[there] > 0.0).all()


def test_the_weights_are_a_fixed_point_up_to_the_residual_reported():
    outs, bids, tau = inputs(size=0.5)
    residuals = []
    for iterations in (1, 3, 8, 30):
        # Operation by operation: each is compiled once for all rounds, of which there are many here.
        _, w, residual = aggregate(outs, bids, tau, Rules("nash", iterations))
        _, after, _ = aggregate(outs, bids, tau, Rules("nash", iterations + 1))
        np.testing.assert_allclose(np.abs(np.stack(after) - np.stack(w)).sum(axis=0), residual, atol=1e-5)
        residuals.append(float(residual.max()))
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[-1] < 1e-5


def test_a_scale_that_disagrees_loses_weight():
    same, none = np.ones((1, 8, 1, 4), np.float32), np.zeros((1, 8, 1), np.float32)
    _, w, _ = aggregated((same, same, same, -same), (none,) * 4, np.ones(1, np.float32), Rules())
    assert float(w[3][0, 7, 0]) < float(w[0][0, 7, 0]) < 0.5


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def loss_of(outs, bids, tau, size):
    return jnp.sum(aggregate(outs, bids, tau, Rules())[0] / size)


@pytest.mark.parametrize("size", [0.0, 1e4, 1e15])
def test_no_size_of_the_outputs_gives_a_nan(size):
    outs, bids, tau = inputs(size=size)
    value, grads = loss_of(outs, bids, tau, np.float32(max(size, 1.0)))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
