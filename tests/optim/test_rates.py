"""Rates by role: one learning rate changes activations by as much at every width; gates learn faster."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nash_mhc.config.schema import ModelConfig, OptimConfig, TrainConfig
from nash_mhc.model.layer import residual_class
from nash_mhc.model.lm import LM
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.optim.optimizers import make_optimizer
from nash_mhc.optim.schedule import Hyperparameters, rates

WIDTHS = (64, 512)
T, STEPS = 16, 2


def model_of_width(width: int) -> ModelConfig:
    """The architecture of the presets, with as many heads per width."""
    heads = width // 32
    return ModelConfig(
        vocab_size=64, width=width, layers=2, heads=heads, kv_heads=heads, head_dim=32, ffn=width,
        scales=2, ratio=4, nash_iterations=1, conv_taps=3, residual="mhc-layer", streams=2,
    )  # fmt: skip


def what_it_computes(model: LM, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Return the stream after each layer, the logits of the streams' maps, and those of the next token."""
    cfg, residual = model.cfg, residual_class(model.cfg)
    layout = attention_layout(tokens_BT.shape, None, cfg.strides)
    state = residual.enter(cfg, model.embed_VD[tokens_BT] * cfg.width**0.5)

    def body(state: Any, layer: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        maps_BTM = jnp.log(layer.attention_residual.read(state, layer.attention_norm)[1].all_BTM)
        state = layer(state, layout, window=cfg.window, kernel="xla")
        return state, (maps_BTM, residual.leave(state))

    state, (maps_LBTM, streams_LBTD) = jax.lax.scan(body, state, model.layers)  # a layer is compiled once
    seen = {f"maps of layer {i}": maps_BTM for i, maps_BTM in enumerate(maps_LBTM)}
    seen |= {f"stream after layer {i}": stream_BTD for i, stream_BTD in enumerate(streams_LBTD)}
    return seen | {"logits": model.norm(residual.leave(state)) @ model.unembed_VD.T}


def moved(width: int, learning_rate: float = 5e-4) -> dict[str, float]:
    """Return by how much a few steps change each, as root mean square over tokens and channels."""
    optim = OptimConfig(learning_rate=learning_rate, warmup_steps=0, schedule="constant", weight_decay=0.0)
    h = Hyperparameters.of(optim, TrainConfig())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, T + 1)))

    def loss(model: LM) -> tuple[jax.Array, dict[str, jax.Array]]:
        seen = what_it_computes(model, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(seen["logits"], tokens[:, 1:]).mean(), seen

    def step(carry: tuple[LM, Any], _: None) -> tuple[tuple[LM, Any], dict[str, jax.Array]]:
        model, state = carry
        gradients, seen = jax.grad(loss, has_aux=True)(model)
        updates, state = make_optimizer(h, model).update(gradients, state, model)
        return (optax.apply_updates(model, updates), state), seen

    @jax.jit
    def run() -> dict[str, jax.Array]:
        model = LM.init(model_of_width(width), key=jax.random.key(0))
        model = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), model)  # not weakly typed, as after a step
        # A step reports the values before its update.
        _, each = jax.lax.scan(step, (model, make_optimizer(h, model).init(model)), length=STEPS + 1)
        return {name: jnp.sqrt(jnp.mean((seen[-1] - seen[0]) ** 2)) for name, seen in each.items()}

    return {name: float(change) for name, change in run().items()}


@functools.cache
def slopes() -> dict[str, float]:
    """Return the exponent of the width by which each change grows."""
    each = [moved(width) for width in WIDTHS]
    return {name: float(np.polyfit(np.log(WIDTHS), np.log([m[name] for m in each]), 1)[0]) for name in each[0]}


@pytest.mark.long
def test_a_step_moves_wide_models_as_far_as_narrow_ones() -> None:
    found = slopes()
    # These see nothing but the table. A token's row is looked up, not summed over, so it moves by the rate itself, and
    # the rate is the one that suits the table as output:
    # a model that shares it learns its input more slowly the wider it is.
    assert -0.6 < found.pop("maps of layer 0") < 0.25
    assert all(abs(slope) < 0.25 for slope in found.values()), found


def test_a_gate_learns_faster_than_a_matrix_of_the_same_width() -> None:
    cfg = dataclasses.replace(model_of_width(64), residual="mhc")  # with gates of the feed-forward layer
    model = jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))
    factors = rates(model)
    matrix, gate = factors.layers.ffn.gate_DF, factors.layers.ffn_residual.phi_RDM
    assert matrix == pytest.approx(10.0)  # 640 / 64
    assert gate == pytest.approx(40.0)
    assert factors.layers.ffn_residual.bias_M == pytest.approx(4.0)
    assert factors.layers.ffn_norm.scale_D == factors.layers.attention_conv.taps_JD == 1.0
