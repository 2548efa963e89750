"""Decoding with caches: the same logits as the whole model, at the price of one token."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model import LM
from nash_mhc.model.protocol import Execution

# Few iterations compile faster, and every one is the same code as in the whole model.
BASE = dataclasses.replace(small.NASH, vocab_size=40, width=16, heads=4, kv_heads=4, ffn=24, nash_iterations=2)

# Every option that attention or the residual has appears with another value somewhere.
CONFIGS: dict[str, dict[str, Any]] = {
    "whole": {"scales": 4, "window": 8},
    "grouped, no window, biased, plain": {
        "scales": 3, "kv_heads": 2, "qkv_bias": True, "qk_norm": False, "window": None, "tied_embeddings": False
    },
    "ratio 3, convex, plain": {"scales": 3, "ratio": 3, "window": 9, "aggregation": "convex", "conv_taps": 1},
    "two scales, mean, wide heads, one layer in two without a window, plain": {
        "scales": 2, "ratio": 4, "window": 4, "aggregation": "mean", "head_dim": 64, "kv_heads": 2, "layers": 4, "full_every": 2
    },
    "one scale, window, mixed once a layer": {"scales": 1, "window": 5, "kv_heads": 1},
    "dense, plain": {"scales": 1, "window": None, "conv_taps": 0},
}  # fmt: skip


def config(name: str) -> ModelConfig:
    residual = "plain" if name.endswith("plain") else "mhc-layer" if name.endswith("layer") else "mhc"
    return dataclasses.replace(BASE, residual=residual, **CONFIGS[name])


@functools.cache
def model_of(cfg: ModelConfig) -> LM:
    """With noise on every parameter: what starts at 0 or 1 would not be missed if it were left out."""
    made: LM = jax.device_put(small.generic_model(cfg))
    return made


def tokens_of(cfg: ModelConfig, B: int, T: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, cfg.vocab_size, (B, T), np.int32)


@jax.jit(static_argnames=("seq_len", "dtype"))
def decoded(model: LM, tokens_BT: jax.Array, seq_len: int, dtype: str = "float32") -> jax.Array:
    def body(cache, tokens_B):
        logits_BV, cache = LM.decode(model, cache, tokens_B)
        return cache, logits_BV

    logits_TBV = jax.lax.scan(body, LM.empty_cache(model.cfg, tokens_BT.shape[0], seq_len, dtype), tokens_BT.T)[1]
    return jnp.swapaxes(logits_TBV, 0, 1)


@jax.jit(static_argnames="dtype")
def whole(model: LM, tokens_BT: jax.Array, dtype: str = "float32") -> jax.Array:
    return model(tokens_BT, execution=Execution(dtype, attention="reference"))


def length(cfg: ModelConfig) -> int:
    """More than three of the coarsest blocks and several windows, and no multiple of a stride."""
    return max(3 * cfg.coarsest_stride, 20) + 1


# A dense model is read with a cache in test_weights, too; the grouped one below, in bfloat16.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * name.startswith(("dense", "grouped"))) for name in CONFIGS]
)
def test_step_by_step_is_the_whole_forward_pass_at_every_position(name: str) -> None:
    cfg = config(name)
    T = length(cfg)
    assert cfg.scales == 1 or T % cfg.ratio
    model, tokens_BT = model_of(cfg), tokens_of(cfg, 2, T)
    # Room for these tokens and no more: with several scales, the last block has begun and cannot end.
    np.testing.assert_allclose(decoded(model, tokens_BT, T), whole(model, tokens_BT), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_as_near_to_float32_as_the_whole_forward_pass_is() -> None:
    cfg = config("grouped, no window, biased, plain")
    model, tokens_BT = model_of(cfg), tokens_of(cfg, 2, length(cfg))
    exact = np.asarray(whole(model, tokens_BT))
    error = lambda logits: math.sqrt(np.mean((np.asarray(logits) - exact) ** 2) / np.mean(exact**2))
    one_by_one, at_once = decoded(model, tokens_BT, 64, "bfloat16"), whole(model, tokens_BT, "bfloat16")
    assert 0 < error(at_once) < 0.03
    assert error(one_by_one) < 1.5 * error(at_once)
    assert jax.eval_shape(lambda: LM.empty_cache(cfg, 2, 64, "bfloat16")).dtype == jnp.bfloat16


reader = jax.jit(small.read)
ROOM = 200  # that is not used has no say either


def test_a_chunk_is_read_as_its_tokens_are_and_padding_is_not_read() -> None:
    cfg = config("whole")
    model, tokens_BT = model_of(cfg), tokens_of(cfg, 2, length(cfg))
    expected_BTV = whole(model, tokens_BT)
    cache = LM.empty_cache(cfg, 2, ROOM)
    for first, count in ((0, 7), (7, 1), (8, 12)):
        chunk = np.full((2, 16), 39, np.int32)
        chunk[:, :count] = tokens_BT[:, first : first + count]
        logits_BV, cache = reader(model, cache, chunk, np.int32(count))
        assert int(cache.position) == first + count
        np.testing.assert_allclose(logits_BV, expected_BTV[:, first + count - 1], rtol=1e-4, atol=1e-4)


def test_a_fresh_cache_has_no_say_wherever_its_rows_are_still_to_come() -> None:
    """A scale whose first block has not ended is absent: its weight is 0, not small, and so it is for rows and taps."""
    cfg = config("whole")
    model, tokens_BT = model_of(cfg), tokens_of(cfg, 2, 16)
    clean = LM.empty_cache(cfg, 2, ROOM)
    nonsense = jax.tree.map(lambda a: np.asarray(a) + np.float32(1e4), [layer.mixer for layer in clean.layers])
    layers = tuple(layer._replace(mixer=mixer) for layer, mixer in zip(clean.layers, nonsense, strict=True))
    soiled = dataclasses.replace(clean, layers=layers)
    for count in range(1, 17):
        one, other = (reader(model, cache, tokens_BT, np.int32(count))[0] for cache in (clean, soiled))
        np.testing.assert_array_equal(one, other)


def test_a_full_cache_answers_nothing_rather_than_nonsense() -> None:
    cfg = config("dense, plain")
    logits_BTV = np.asarray(decoded(model_of(cfg), tokens_of(cfg, 1, 10), 8))
    assert np.isfinite(logits_BTV[:, :8]).all()
    assert np.isnan(logits_BTV[:, 8:]).all()


def matmul_flops(jaxpr, *, branches: bool) -> float:
    """Of every dot in a program, loops counted as often as they run;
    `branches` says whether the dearest of a `cond` counts."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        values = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr"))
        inner = [j for value in values if hasattr(j := getattr(value, "jaxpr", value), "eqns")]
        costs = [matmul_flops(j, branches=branches) for j in inner]
        if eqn.primitive.name == "cond":
            total += max(costs) if branches else 0.0
        else:
            total += sum(costs) * eqn.params.get("length", 1)
    return total


@functools.cache
def traced(cfg: ModelConfig, seq_len: int) -> Any:
    model = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    cache = jax.eval_shape(lambda: LM.empty_cache(cfg, 1, seq_len))
    return jax.make_jaxpr(LM.decode)(model, cache, jax.ShapeDtypeStruct((1,), jnp.int32)).jaxpr


def flops_of_a_token(cfg: ModelConfig, seq_len: int, *, branches: bool) -> float:
    return matmul_flops(traced(cfg, seq_len), branches=branches)


def test_a_token_pays_for_the_summaries_it_looks_at_and_nothing_else_grows_with_the_text() -> None:
    cfg = config("whole")
    T = 512
    short, long = (flops_of_a_token(cfg, n, branches=False) for n in (T, 4 * T))
    rows = 3 * sum(T // stride for stride in cfg.strides[1:])  # scores and values of each
    assert long - short == 4.0 * rows * cfg.heads * cfg.head_dim * cfg.layers
    model = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    forward = jax.make_jaxpr(lambda m, t: m(t))(model, jax.ShapeDtypeStruct((1, T), jnp.int32))
    whole_pass = matmul_flops(forward.jaxpr, branches=True)
    # Also of the dearest of all, which ends a block of every scale: no share of a forward pass.
    assert short <= flops_of_a_token(cfg, T, branches=True) < whole_pass / 20


def test_the_cache_is_written_in_place() -> None:
    """No operation of the compiled step makes a whole stack of rows anew,
    which would cost as much as reading all of them."""
    cfg = dataclasses.replace(config("whole"), layers=5, residual="plain")
    model = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    cache = jax.eval_shape(lambda: LM.empty_cache(cfg, 1, 256))
    lowered = jax.jit(LM.decode, donate_argnums=1).lower(model, cache, jax.ShapeDtypeStruct((1,), jnp.int32))
    text = lowered.compile().as_text()
    (mixer,) = (layer.mixer for layer in cache.layers)
    stacks = {",".join(map(str, rows.k_LBKSH.shape)) for rows in [mixer.fine, *(scale.rows for scale in mixer.coarse)]}
    for stack in stacks:
        assert f"f32[{stack}]" in text  # the check can see them
        copies = [line for line in text.splitlines() if f" = f32[{stack}]" in line and " copy(" in line]
        assert not copies, copies[0]
