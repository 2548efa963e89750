"""Every attention kernel that runs here against the plain form, values and gradients;
and what attention must not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nash_mhc.ops.attend import attend, best_kernel, unsupported_reason
from nash_mhc.ops.kernels.attend_cudnn import documents_of
from nash_mhc.ops.kernels.attend_splash import _kernel
from nash_mhc.ops.rope import Rotation, positions_in_segments, rope


def inputs(T=96, N=4, K=2, H=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, T, heads, H)), dtype) for heads in (N, K, K))
    return q, k, v, jnp.asarray(np.sort(rng.integers(0, 4, (2, T), np.int32), axis=1))


def value_and_grads(kernel, q, k, v, segments, window):
    def scalar(q, k, v):
        out = attend(q, k, v, segments, window=window, kernel=kernel)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), grads = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, grads


# 100: an odd block at the end; 600: so many that blocks grow.
@pytest.mark.parametrize(("T", "window", "packed"), [(100, None, True), (100, 7, False), (600, 7, True)])
def test_the_block_kernel_equals_the_plain_form(T, window, packed):
    q, k, v, segments = inputs(T)
    segments = segments if packed else None
    want, want_grads = value_and_grads("reference", q, k, v, segments, window)
    got, got_grads = value_and_grads("xla", q, k, v, segments, window)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_the_splash_kernel_equals_the_plain_form_in_the_tpu_interpreter(window, monkeypatch):
    # Head widths below a lane are padded, several query heads share a kv head: the parts that are our own.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    make = splash.make_splash_mqa_single_device
    monkeypatch.setattr(splash, "make_splash_mqa_single_device", lambda **options: make(**options, interpret=True))
    q, k, v, segments = inputs(T=640 if window else 128, H=16)  # 640: not a multiple of the largest block
    want, want_grads = value_and_grads("reference", q, k, v, segments, window)
    got, got_grads = value_and_grads("splash", q, k, v, segments, window)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def test_bfloat16_stays_near_float32():
    q, k, v, segments = inputs()
    run = jax.jit(attend, static_argnames="kernel")
    want = run(q, k, v, segments, kernel="reference")
    got = run(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), segments, kernel="xla")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=4e-2)


def test_a_query_sees_only_its_past_its_document_and_its_window():
    q, k, v, segments = inputs(T=64)
    window, t = 9, 40
    moved = jax.jit(jax.grad(lambda v: attend(q, k, v, segments, window=window)[0, t].sum()))(v)[0]
    seen = np.flatnonzero(np.abs(np.asarray(moved)).sum(axis=(1, 2)))
    document = np.asarray(segments[0])
    allowed = [s for s in range(64) if s <= t and t - s < window and document[s] == document[t]]
    assert seen.tolist() == allowed


def test_an_unknown_kernel_is_refused():
    q, k, v, segments = inputs()
    with pytest.raises(ValueError, match="unknown attention kernel 'flash'; choose from reference, xla"):
        attend(q, k, v, segments, kernel="flash")


def test_auto_takes_the_platforms_best():
    pairs = [("tpu", "bfloat16"), ("gpu", "bfloat16"), ("gpu", "float32"), ("cpu", "float32")]
    assert [best_kernel(*pair, 4096, 128, None) for pair in pairs] == ["splash", "cudnn", "xla", "xla"]
    # Shapes that the fast kernels do not take.
    assert best_kernel("tpu", "bfloat16", 4000, 128, None) == "xla"
    assert best_kernel("gpu", "bfloat16", 4096, 4, None) == "xla"


def test_the_tables_of_splash_lie_on_no_device():
    """A step may be compiled for devices that are not here (`bench compile`): nothing can be put on these."""
    seen = []

    def traced(x):
        seen.extend(jax.tree.leaves(_kernel(2, 256, 64)))
        return x

    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        jax.jit(traced).lower(1.0)
    assert seen and all(isinstance(table, np.ndarray) for table in seen)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cudnn", "cpu", "bfloat16", 128, 64, None), "runs on gpu, not on cpu"),
        (("splash", "gpu", "bfloat16", 128, 64, None), "runs on tpu, not on gpu"),
        (("cudnn", "gpu", "float32", 128, 64, None), "takes bfloat16, not float32"),
        (("splash", "tpu", "bfloat16", 100, 64, None), "takes a T that is a multiple of 128, not 100"),
        (("xla", "cpu", "float32", 7, 2, 3), None),
    ],
)
def test_a_kernel_that_cannot_run_says_why(arguments, reason):
    assert unsupported_reason(*arguments) == reason


def test_rope_scores_depend_on_distance_alone():
    q, k, _, _ = inputs(T=4, N=2, K=2)
    at = lambda shift: jnp.tile(jnp.arange(4)[None] + shift, (2, 1))
    turned = jax.jit(lambda x, shift: rope(x, at(shift), Rotation(100.0)))
    scores = [np.einsum("btnh,bsnh->bnts", turned(q, shift), turned(k, shift)) for shift in (0, 11)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_positions_count_from_zero_in_each_document():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    assert jax.jit(positions_in_segments)(segments).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("most", [None, 3, 5, 33])
def test_documents_are_found_where_the_segments_change(most):
    """Room for a power of two where their number is known; a count, for the device to branch on, where it is not."""
    segments_BT = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 0, 0, 0, 0, 0]])
    found = jax.device_get(jax.jit(documents_of, static_argnums=1)(jnp.asarray(segments_BT), most))
    room = {3: 4, 5: 8}.get(most, 32)
    assert found.lengths_BM.shape == found.starts_BM.shape == (3, room)
    assert found.count_B is None if most in (3, 5) else found.count_B.tolist() == [4, 1, 3]
    for row, segments in enumerate(segments_BT):
        starts = [0, *(np.flatnonzero(np.diff(segments)) + 1)][:room]
        missing = [0] * (room - len(starts))
        assert found.starts_BM[row].tolist()[: len(starts)] == starts
        assert found.lengths_BM[row].tolist() == [*np.diff([*starts, 8]).tolist(), *missing]
        assert found.number_BT[row].tolist() == (np.cumsum(np.isin(np.arange(8), starts)) - 1).tolist()
