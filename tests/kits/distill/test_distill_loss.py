"""The distillation loss against a reference, autodiff on all logits, and a sharded vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from nash_mhc.kits.distill.loss import DistillSums, LossWeights, TeacherLogits, distill, teacher_logits

B, T, D, V, REAL = 2, 6, 8, 24, 21  # a vocabulary with padding


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    x, teacher_x = (jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32) for _ in range(2))
    w, teacher_w = (jnp.asarray(rng.normal(size=(V, D)), jnp.float32) for _ in range(2))
    targets = jnp.asarray(rng.integers(0, REAL, (B, T), np.int32))
    weights = jnp.asarray(rng.random((B, T)) > 0.3, jnp.float32)
    return x, w, targets, weights, teacher_x, teacher_w


found_likeliest = jax.jit(teacher_logits, static_argnames=("vocab_size", "k", "vocabulary", "random", "temperature"))
distill_and_grads = functools.partial(distill, with_grads=True)
loss_and_grads = jax.jit(distill_and_grads, static_argnames=("vocab_size", "parts"))


def known(given, k, temperature=1.0, random=0, found_by=None):
    """Return the teacher's logits; by numpy, which compiles nothing, unless random tokens are needed."""
    if not random and found_by is None:
        z = np.einsum("btd,vd->btv", *given[4:])[..., :REAL]
        ids = np.argsort(-z, axis=-1, kind="stable")[..., :k].astype(np.int32)
        lse = np.log(np.sum(np.exp(z / temperature), axis=-1))
        return TeacherLogits(*map(jnp.asarray, (ids, np.take_along_axis(z, ids, -1), lse)))
    how = {"vocab_size": REAL, "k": k, "random": random, "temperature": temperature}
    return found_likeliest(*given[4:], given[2], **how)


def rest(p_rest, q_rest):
    p = jnp.maximum(p_rest, 1e-7)
    return jnp.where(p_rest > 1e-7, p * (jnp.log(p) - jnp.log(jnp.maximum(q_rest, 1e-7))), 0.0)


def reference(x_BTD, w_VD, targets_BT, weights_BT, teacher, *, vocab_size, parts):
    """Compute the sums from all logits at once."""
    z_BTV = jnp.einsum("btd,vd->btv", x_BTD, w_VD, preferred_element_type=jnp.float32)[..., :vocab_size]
    t = parts.temperature
    logp_BTK = teacher.logits.astype(jnp.float32) / t - teacher.lse[..., None]
    logq_BTK = jnp.take_along_axis(jax.nn.log_softmax(z_BTV / t), teacher.ids, axis=-1)
    if parts.renormalised:
        K = teacher.ids.shape[-1] - parts.random
        logp_BTK, logq_BTK = logp_BTK[..., :K], logq_BTK[..., :K]
        logp_BTK, logq_BTK = (a - jax.nn.logsumexp(a, axis=-1, keepdims=True) for a in (logp_BTK, logq_BTK))
    counts_K = jnp.asarray(parts.counts(teacher.ids.shape[-1], vocab_size))[: logp_BTK.shape[-1]]
    kl_BT = jnp.sum(counts_K[None, None] * jnp.exp(logp_BTK) * (logp_BTK - logq_BTK), axis=-1)
    if not parts.renormalised and not parts.random:
        p_rest_BT, q_rest_BT = (1 - jnp.sum(jnp.exp(a), axis=-1) for a in (logp_BTK, logq_BTK))
        kl_BT += rest(p_rest_BT, q_rest_BT)
    log_probs_BTV = jax.nn.log_softmax(z_BTV)
    at = lambda ids_BT: -jnp.take_along_axis(log_probs_BTV, ids_BT[..., None], axis=-1)[..., 0]
    first_BT, best_BT = teacher.ids[..., 0], jnp.argmax(z_BTV, axis=-1)
    ce_BT, hard_BT = at(targets_BT), at(first_BT)
    measured = (kl_BT, ce_BT, hard_BT, 1.0 * (best_BT == first_BT), 1.0 * (best_BT == targets_BT))
    kl, ce, hard, agree, correct = (jnp.sum(a * weights_BT) for a in measured)
    loss = parts.soft * kl + parts.text * ce + parts.hard * hard
    return DistillSums(loss, kl, ce, hard, agree, correct, jnp.sum(weights_BT))


CASES = {
    "plain": LossWeights(),
    "text and first choice": LossWeights(text=0.3, hard=0.05),
    "warm": LossWeights(text=0.2, hard=0.1, temperature=2.0),
    "renormalised": LossWeights(text=0.1, renormalised=True),
    "renormalised and warm": LossWeights(temperature=3.0, renormalised=True),
    "random": LossWeights(text=0.2, hard=0.1, temperature=2.0, random=7),
    "random, and not looked at": LossWeights(renormalised=True, random=7),
}


# One token alone is all that is renormalised; of all tokens nothing is left over, and there are no others.
KNOWN = [(5, name) for name in CASES]
KNOWN += [(1, "text and first choice"), (1, "renormalised and warm"), (1, "random"), (REAL, "warm"), (REAL, "renormalised")]


@pytest.mark.parametrize(("k", "name"), KNOWN, ids=str)
def test_chunked_loss_and_gradients_equal_the_reference(given, k, name):
    x, w, targets, weights = given[:4]
    parts = CASES[name]
    teacher = known(given, k, parts.temperature, parts.random)
    settings = {"vocab_size": REAL, "parts": parts}

    def plain(x, w):
        found = reference(x, w, targets, weights, teacher, **settings)
        return found.loss, found

    (dx, dw), want = jax.jit(jax.grad(plain, argnums=(0, 1), has_aux=True))(x, w)
    got, got_dx, got_dw = loss_and_grads(x, w, targets, weights, teacher, **settings)
    for part, a, b in zip(want._fields, got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=part)
    np.testing.assert_allclose(got_dx, dx, atol=2e-5)
    np.testing.assert_allclose(got_dw, dw, atol=2e-5)
    without = jax.jit(lambda x, w: distill(x, w, targets, weights, teacher, **settings)[0])(x, w)
    for a, b in zip(without, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_give_the_full_divergence(given, temperature):
    x, w, targets, weights, teacher_x, teacher_w = given
    p = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", teacher_x, teacher_w)[..., :REAL] / temperature)

    def whole(x, w):
        q = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", x, w)[..., :REAL] / temperature)
        return temperature**2 * jnp.sum(weights * jnp.sum(jnp.exp(p) * (p - q), axis=-1))

    teacher = known(given, REAL, temperature)
    parts = LossWeights(temperature=temperature)
    got, dx, dw = loss_and_grads(x, w, targets, weights, teacher, vocab_size=REAL, parts=parts)
    want, grads = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(x, w)
    np.testing.assert_allclose(got.loss, want, rtol=1e-5)
    for a, b in zip((dx, dw), grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_rest_counts_as_one_token(given):
    """The loss is the divergence of distributions with the other tokens merged into one."""
    x, w, targets, weights, teacher_x, teacher_w = given
    teacher = known(given, 4)
    p = jax.nn.softmax(jnp.einsum("btd,vd->btv", teacher_x, teacher_w)[..., :REAL])
    chosen = jax.nn.one_hot(teacher.ids, REAL).sum(axis=-2)

    def together(probs):
        return jnp.concatenate([jnp.take_along_axis(probs, teacher.ids, -1), jnp.sum(probs * (1 - chosen), -1)[..., None]], -1)

    def whole(x, w):
        q = together(jax.nn.softmax(jnp.einsum("btd,vd->btv", x, w)[..., :REAL]))
        return jnp.sum(weights[..., None] * together(p) * jnp.log(together(p) / q))

    got, dx, dw = loss_and_grads(x, w, targets, weights, teacher, vocab_size=REAL, parts=LossWeights())
    want, grads = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(x, w)
    np.testing.assert_allclose(got.loss, want, rtol=1e-5)
    for a, b in zip((dx, dw), grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_random_tokens_make_the_divergence_unbiased(given):
    x, w, targets, weights, teacher_x, teacher_w = given
    k, many = 4, 20_000
    teacher = known(given, k, random=many)
    ids = np.asarray(teacher.ids)
    for likeliest_K, drawn_R in zip(ids[..., :k].reshape(-1, k), ids[..., k:].reshape(-1, many), strict=True):
        assert set(drawn_R) == set(range(REAL)) - set(likeliest_K)  # none of the likeliest, each of the others
    z = np.einsum("btd,vd->btv", teacher_x, teacher_w)[..., :REAL]
    np.testing.assert_allclose(teacher.logits, np.take_along_axis(z, ids, -1), rtol=1e-5, atol=1e-5)
    whole, dx, dw = loss_and_grads(x, w, targets, weights, known(given, REAL), vocab_size=REAL, parts=LossWeights())
    drawn = loss_and_grads(x, w, targets, weights, teacher, vocab_size=REAL, parts=LossWeights(random=many))
    np.testing.assert_allclose(drawn[0].loss, whole.loss, rtol=0.01)
    np.testing.assert_allclose(drawn[1], dx, atol=0.02)
    np.testing.assert_allclose(drawn[2], dw, atol=0.05)
    # The same row of text has the same ones, wherever it stands; another has others.
    again = found_likeliest(teacher_x[::-1], teacher_w, targets[::-1], vocab_size=REAL, k=k, random=many)
    np.testing.assert_array_equal(again.ids[::-1], ids)
    assert not np.array_equal(ids[0, :, k:], ids[1, :, k:])


def test_positions_without_weight_do_not_count(given):
    x, w, targets, weights, *_ = given
    teacher = known(given, 4)
    other = jax.tree.map(lambda a: jnp.where(weights.reshape(B, T, *(1,) * (a.ndim - 2)) > 0, a, a[:1, :1]), teacher)
    run = lambda teacher: loss_and_grads(x, w, targets, weights, teacher, vocab_size=REAL, parts=LossWeights(text=0.5))
    (one, dx, dw), (two, other_dx, other_dw) = run(teacher), run(other)
    np.testing.assert_array_equal(one.loss, two.loss)
    np.testing.assert_array_equal(dw, other_dw)
    np.testing.assert_array_equal(dx, other_dx)
    assert (np.asarray(dx)[np.asarray(weights) == 0] == 0).all()


def test_a_sharded_vocabulary_gives_the_same_logits_and_loss(given):
    x, w, targets, weights, teacher_x, teacher_w = given
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    find = functools.partial(teacher_logits, vocab_size=REAL, k=5, random=3, vocab_axes=("tp",))
    found = jax.jit(split(find, in_specs=(P(), P("tp"), P()), out_specs=P()))(teacher_x, teacher_w, targets)
    teacher = known(given, 5, random=3)
    np.testing.assert_array_equal(found.ids, teacher.ids)
    np.testing.assert_allclose(found.logits, teacher.logits, rtol=1e-6)
    np.testing.assert_allclose(found.lse, teacher.lse, rtol=1e-6)
    parts = LossWeights(text=0.2, hard=0.1, temperature=2.0, random=3)
    settings = {"vocab_size": REAL, "parts": parts}

    def local(x, w):
        sums, dx, dw = distill_and_grads(x, w, targets, weights, teacher, **settings, vocab_axes=("tp",))
        return sums, jax.lax.psum(dx, "tp"), dw

    got = jax.jit(split(local, in_specs=(P(), P("tp")), out_specs=(P(), P(), P("tp"))))(x, w)
    want = loss_and_grads(x, w, targets, weights, teacher, **settings)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_logits_never_exist_as_a_whole(given):
    x, w, targets, weights, *_ = given
    teacher = known(given, 4)
    run = lambda x, w: distill_and_grads(x, w, targets, weights, teacher, vocab_size=REAL, parts=LossWeights())
    text = jax.jit(run).lower(x, w).as_text()
    assert f"tensor<{B}x{T}x{V}x" not in text and f"tensor<{B * T}x{V}x" not in text


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_teacher_logits_equal_numpy(given, temperature):
    teacher = known(given, 6, temperature, found_by=teacher_logits)
    assert isinstance(teacher, TeacherLogits)
    z = np.einsum("btd,vd->btv", *given[4:])[..., :REAL]
    ids = np.argsort(-z, axis=-1)[..., :6]
    np.testing.assert_array_equal(teacher.ids, ids)
    np.testing.assert_allclose(teacher.logits, np.take_along_axis(z, ids, -1), rtol=1e-6)
    np.testing.assert_allclose(teacher.lse, np.log(np.sum(np.exp(z / temperature), axis=-1)), rtol=1e-6)
