"""Reading from, writing to, projecting and mapping residual streams:
fused forms and GPU kernels against plain einsums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.config.schema import MeshConfig
from nash_mhc.model.residual import Projection, read_and_norm_streams, read_streams, write_streams
from nash_mhc.ops import residual_streams
from nash_mhc.ops.norm import rms_norm_reference
from nash_mhc.ops.platform import comparing_kernels
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.sharding import named_sharding

R, B, T, D, M = 4, 2, 64, 96, 24  # 128 tokens: a whole block of every kernel; three chunks of columns
EPS = 1e-6
ROUNDS = 4000  # of the plain form, after which it has converged for the logits of these tests


def inputs(dtype=jnp.float32, seed=0, streams=R):
    rng, width = np.random.default_rng(seed), streams * (streams + 2)
    *xs, y = (jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(streams + 1))
    maps = jnp.asarray(rng.normal(size=(B, T, width)), jnp.promote_types(dtype, jnp.float32))
    return tuple(xs), y, maps, jnp.asarray(0.1 * rng.normal(size=(streams, D, width)), dtype)


def logits(dtype, spread=0.5):
    noise = spread * np.random.default_rng(9).normal(size=(B, T, M))
    return jnp.asarray(noise + np.concatenate([np.zeros(2 * R), 6.0 * np.eye(R).ravel()])[None, None], dtype)


def sub_layer(xs, y_BTD, projection):
    """(what is read, the new streams) of a sub-layer that makes something of what it reads."""
    x_BTD, maps = read_streams(EPS, xs, residual_streams.squares(xs), projection)
    return x_BTD, write_streams(maps.xs, jnp.tanh(x_BTD) * y_BTD, maps.all_BTM)[0]


def plain_sub_layer(xs, y_BTD, projection, norm=lambda x_BTD: x_BTD):
    logits_BTM = residual_streams.project_reference(xs, projection.phi_RDM, 1e-6)
    logits_BTM = projection.alpha_M[None, None] * logits_BTM + projection.bias_M[None, None]
    maps_BTM = residual_streams.maps_reference(logits_BTM, ROUNDS)
    x_BTD = norm(residual_streams.read_reference(xs, maps_BTM))
    return x_BTD, residual_streams.write_reference(xs, jnp.tanh(x_BTD) * y_BTD, maps_BTM)


def normed_sub_layer(xs, y_BTD, projection, scale_D):
    """With the kernels that also normalise what is read."""
    x_BTD, maps = read_and_norm_streams(EPS, xs, residual_streams.squares(xs), projection, scale_D)
    return x_BTD, write_streams(maps.xs, jnp.tanh(x_BTD) * y_BTD, maps.all_BTM)[0]


def plain_normed_sub_layer(xs, y_BTD, projection, scale_D):
    return plain_sub_layer(xs, y_BTD, projection, lambda x_BTD: rms_norm_reference(x_BTD, scale_D, 1e-6))


def forms(name, dtype=jnp.float32):
    """(fast form, plain form, arguments). Whole sub-layers have three streams, the fewest whose mixing is no symmetric
    matrix: four are compiled for half as long again, and stand in everything that they consist of."""
    whole = name in ("sub-layer", "normed")
    xs, y, maps, phi = inputs(dtype, streams=3 if whole else R)
    wide = np.promote_types(dtype, np.float32)
    bias = np.concatenate([np.zeros(2 * len(xs)), 2.0 * np.eye(len(xs)).ravel()]).astype(wide)
    projection = Projection(phi, np.linspace(0.5, 1.5, len(bias), dtype=wide), bias)
    return {
        "sub-layer": (sub_layer, plain_sub_layer, (xs, y, projection)),
        "normed": (normed_sub_layer, plain_normed_sub_layer, (xs, y, projection, np.linspace(0.5, 2.0, D).astype(dtype))),
        "read": (residual_streams.read, residual_streams.read_reference, (xs, maps)),
        "write": (lambda *args: residual_streams.write(*args)[0], residual_streams.write_reference, (xs, y, maps)),
        "products": (residual_streams.products, residual_streams.products_reference, (xs, phi)),
        "maps": (
            residual_streams.maps,
            lambda x: residual_streams.maps_reference(x, ROUNDS),
            (logits(jnp.promote_types(dtype, jnp.float32)),),
        ),
    }[name]


def weighted(tree):
    """A loss with another weight on every element."""
    leaves = jax.tree.leaves(tree)
    return sum(jnp.sum(jnp.sin(jnp.arange(x.size).reshape(x.shape)).astype(x.dtype) * x) for x in leaves)


@functools.cache
def gradient(f):
    """(the gradient of that loss, what `f` gives), compiled once for all tests of a form."""

    def loss(args):
        found = f(*args)
        return weighted(found), found

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.fixture
def in_kernels():
    """In Pallas's interpreter: the same kernels that a GPU compiles."""
    with comparing_kernels(lambda *_: None):
        yield


@pytest.mark.parametrize("name", ["sub-layer", "normed", "maps"])
def test_values_and_gradients_are_those_of_the_plain_form(name, request):
    if name == "normed":
        request.getfixturevalue("in_kernels")
    with jax.enable_x64(True):
        fast, plain, args = forms(name, jnp.float64)
        (got, values), (want, wanted_values) = gradient(fast)(args), gradient(plain)(args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), values, wanted_values)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), got, want)


def test_on_a_mesh_the_gradients_of_all_tokens_are_added_up(in_kernels):
    """Those of phi and of the norm's scale, which every device has of its own tokens."""
    with jax.enable_x64(True):
        _, _, args = forms("normed", jnp.float64)
        want, _ = gradient(plain_normed_sub_layer)(args)
        mesh = make_mesh(MeshConfig(data=1, fsdp=2, tp=4))
        with jax.set_mesh(mesh):
            got, _ = gradient(normed_sub_layer)(jax.device_put(args, named_sharding(mesh)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), got, want)


def test_a_kernel_is_taken_only_where_each_device_has_whole_blocks():
    x_BTD = jnp.zeros((B, T, D))  # 128 tokens
    assert residual_streams.fits_norm(x_BTD) and residual_streams.fits_norm(x_BTD, devices=8)
    assert not residual_streams.fits_norm(x_BTD, devices=16)
    assert not residual_streams.fits_norm(jnp.zeros((B, T, 32 * 11)))  # too many chunks of columns


@pytest.mark.parametrize("name", ["read", "write", "products"])
def test_bfloat16_streams_are_summed_in_float32(name):
    fast, plain, args = forms(name, jnp.bfloat16)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    for a, b in zip(jax.tree.leaves(jax.jit(fast)(*args)), jax.tree.leaves(jax.jit(plain)(*wide)), strict=True):
        # One rounding at the end, or none where the result is a coefficient.
        tolerance = 2**-8 if a.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_gpu_kernels_compute_what_xla_does(dtype):
    """In Pallas's interpreter: the same kernels that a GPU compiles."""
    xs, y, maps, phi = inputs(dtype)
    others, dproducts = tuple(reversed(xs)), maps.astype(dtype)
    x, dmaps = logits(jnp.float32), jnp.asarray(np.random.default_rng(3).normal(size=(B, T, M)), jnp.float32)
    here = functools.partial(functools.partial, interpret=True)
    pairs = [
        (residual_streams._write_in_xla, here(residual_streams.gpu.write), (xs, y, maps)),
        (residual_streams._write_sums_in_xla, here(residual_streams.gpu.write_sums), (xs, y, maps, others)),
        (
            residual_streams._gradient_in_xla,
            here(residual_streams.gpu.gradient),
            (xs, others, y, maps, dproducts, maps[..., 0], phi),
        ),
        (
            functools.partial(residual_streams._maps_in_xla, residual_streams._maps),
            here(residual_streams.gpu.maps, residual_streams._maps),
            (x,),
        ),
        (
            functools.partial(residual_streams._maps_in_xla, residual_streams._maps_backward),
            here(residual_streams.gpu.maps, residual_streams._maps_backward),
            (residual_streams.maps(x), dmaps),
        ),
    ]
    for in_xla, in_kernel, args in pairs if dtype == jnp.float32 else pairs[:3]:  # maps are never in bfloat16
        want, got = jax.jit(in_xla)(*args), jax.jit(in_kernel)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            tolerance = 2**-7 if a.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def test_the_mixing_is_doubly_stochastic_for_every_token():
    maps = jax.jit(residual_streams.maps)(logits(jnp.float32, spread=2.0))
    res = np.array(jax.tree.map(np.asarray, residual_streams.coefficients(maps)[2]))
    assert res.min() >= 0.0
    np.testing.assert_allclose(res.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(res.sum(axis=0), 1.0, atol=2e-6)


def test_squares_are_those_of_the_streams_as_written():
    """Rounded as they are: the next sub-layer divides by them."""
    for dtype in (jnp.float32, jnp.bfloat16):
        xs, y, maps, _ = inputs(dtype)
        written, squares = jax.jit(residual_streams.write)(xs, y, maps)
        want = np.stack([np.sum(np.asarray(x, np.float64) ** 2, axis=-1) for x in written], axis=-1)
        np.testing.assert_allclose(squares, want, rtol=1e-5)


def test_an_empty_token_has_finite_maps_and_gradients():
    with jax.enable_x64(True):  # by the program that is there already; nothing divided by nothing is no number in either
        _, _, (xs, y, projection) = forms("sub-layer", jnp.float64)
        empty = jax.tree.map(jnp.zeros_like, (xs, projection.bias_M))
        found = gradient(sub_layer)((empty[0], jnp.ones_like(y), projection._replace(bias_M=empty[1])))
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(found))
