"""The chunked loss against the plain one: sums and gradients, on one device and on a mesh."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import long

from nash_mhc.config.schema import MeshConfig
from nash_mhc.objectives.vocabulary import sharded_xent
from nash_mhc.ops.xent import chunk_length, xent_and_grads, xent_reference
from nash_mhc.parallel.mesh import make_mesh

B, T, D, V, REAL = 8, 16, 24, 256, 201  # REAL tokens, the rest is padding of the vocabulary


def inputs():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(B, T, D)).astype(np.float32), 0.3 * rng.normal(size=(V, D)).astype(np.float32)
    targets = rng.integers(0, REAL, (B, T), np.int32)
    weights = 1.5 * (rng.random((B, T)) < 0.8).astype(np.float32)
    return tuple(map(jnp.asarray, (x, w, targets, weights)))


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
def plain(x, w, targets, weights, z_weight):
    sums = xent_reference(x, w, targets, weights, vocab_size=REAL, z_weight=z_weight)
    return 0.37 * sums.loss, sums


def chunked(x, w, targets, weights, z_weight):
    sums = sharded_xent(x, w, targets, weights, REAL, z_weight)
    return 0.37 * sums.loss, sums


CASES = [(None, 0.0), (None, 1e-2), ((2, 2, 2), 0.0), ((2, 2, 2), 1e-2)]  # that mesh has every axis
CASES += long(*itertools.product([(1, 1, 1), (1, 8, 1), (1, 1, 8)], [0.0, 1e-2]))


@pytest.mark.parametrize(("shape", "z_weight"), CASES, ids=str)
def test_sums_and_gradients_equal_the_plain_form(shape, z_weight):
    arguments = inputs()
    (_, want), want_grads = plain(*arguments, z_weight)
    run = jax.jit(jax.value_and_grad(lambda *a: chunked(*a, z_weight), argnums=(0, 1), has_aux=True))
    with contextlib.nullcontext() if shape is None else jax.set_mesh(make_mesh(MeshConfig(*shape))):
        (_, got), grads = run(*arguments)
        if not z_weight:  # the entropy is only for evaluations, without a gradient
            got = got._replace(entropy=jax.jit(lambda *a: chunked(*a, z_weight)[1].entropy)(*arguments))
    for name in want._fields if not z_weight else want._fields[:-1]:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_padding_columns_take_no_probability():
    x, w, targets, weights = inputs()
    loud = np.array(w)
    loud[REAL:] = 100.0
    run = jax.jit(lambda *arrays: xent_and_grads(*arrays, vocab_size=REAL, with_grads=False)[0])
    np.testing.assert_allclose(run(x, loud, targets, weights), run(x, w, targets, weights), rtol=1e-6)


@pytest.mark.parametrize("shape", [(8, 32, 384), (1, 2, 10), (64, 4096, 65536), (3, 7, 2**20)])
def test_no_chunk_is_the_whole_row(shape):
    length = chunk_length(*shape)
    assert length < shape[1]
    assert shape[1] % length == 0


def test_huge_logits_stay_finite():
    x, w, targets, weights = inputs()
    large = np.asarray(x) * np.float32(1e4), np.asarray(w) * np.float32(1e3)
    run = jax.jit(lambda *arrays: xent_and_grads(*arrays, vocab_size=REAL, z_weight=1e-3, with_grads=False)[0])
    sums = run(*large, targets, weights)
    assert all(np.isfinite(v) for v in sums)
