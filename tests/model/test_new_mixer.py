"""A new mixer in one file: a gated sliding window, trained on eight devices, decoded, planned and benchmarked."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from jaxtyping import Array, Float, PRNGKeyArray

from nash_mhc.bench.step import DOCUMENTS
from nash_mhc.bench.step_parts import one_group, parts_and_arrays
from nash_mhc.config import model as names
from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.estimate.memory import estimate
from nash_mhc.kits.hub.tensors import tensors
from nash_mhc.model import layer
from nash_mhc.model.kv_cache import KeyValues, TokenAt
from nash_mhc.model.lm import LM, flops_per_token
from nash_mhc.model.mixers.attention import PER_HEAD, Attention, AttentionLayout
from nash_mhc.model.parts import init_matrix
from nash_mhc.model.protocol import Execution
from nash_mhc.model.weights import project
from nash_mhc.ops.attention_io import AttentionInput
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.params import named_leaves, param
from nash_mhc.parallel.sharding import constrain
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.state import abstract_state, sharded_abstract_state


class GatedAttention(eqx.Module):
    """Attention whose heads are gated by the token that asks."""

    base: Attention
    gate_DN: Float[Array, "D N"] = param("embed", "heads")

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> GatedAttention:
        base, gate = jax.random.split(key)
        return GatedAttention(Attention.init(cfg, key=base), init_matrix(gate, (cfg.width, cfg.heads), cfg.width))

    def _gated(self, x_BTD: Array, mixed_BTNH: Array) -> Array:
        gate_BTN = jax.nn.sigmoid(constrain(project(x_BTD, self.gate_DN), "batch", "time", "heads"))
        return self.base.output(constrain(gate_BTN[..., None] * mixed_BTNH, *PER_HEAD))

    def __call__(self, x_BTD: Array, layout: AttentionLayout, *, window: int | None, kernel: str) -> Array:
        segments_BT, positions_BT, documents = layout.original_layout().at(0, 1)
        x_BTD = constrain(x_BTD, "batch", "time", "width")
        q_BTNH, k_BTKH, v_BTKH = self.base.project(x_BTD)
        rows = AttentionInput(*self.base.rotate(q_BTNH, k_BTKH, positions_BT), v_BTKH, segments_BT, documents)
        mixed_BTNH = self.base.attend(rows, window=window, kernel=kernel)
        return constrain(self._gated(x_BTD, mixed_BTNH), "batch", "time_split", "width")

    @staticmethod
    def init_cache(cfg: ModelConfig, window: int | None, layers: int, batch: int, seq_len: int, dtype: Any) -> KeyValues:
        return Attention.init_cache(cfg, window, layers, batch, seq_len, dtype)

    def step(self, x_B1D: Array, cache: KeyValues, at: TokenAt) -> tuple[Array, KeyValues]:
        q_B1NH, k_B1KH, v_B1KH = self.base.project(x_B1D)
        q_B1NH, k_B1KH = self.base.rotate(q_B1NH, k_B1KH, jnp.broadcast_to(at.position, x_B1D.shape[:2]))
        cache = cache.write(at.layer, at.position, k_B1KH, v_B1KH)
        return self._gated(x_B1D, cache.attend(q_B1NH, at.layer, at.position).out_BTNH), cache

    @staticmethod
    def flops_per_token(cfg: ModelConfig, window: int | None, seq_len: int) -> float:
        return Attention.flops_per_token(cfg, window, seq_len) + 6.0 * cfg.width * cfg.heads


@pytest.fixture(autouse=True, scope="module")
def registered():
    layer.register_mixer("gated", GatedAttention)
    yield
    names.MIXERS.remove("gated")


# Gated heads with a window in every other layer, and plain attention over all tokens in the rest.
def gated(**changes: Any) -> ModelConfig:
    return dataclasses.replace(small.MODEL, **{"layers": 4, "pattern": "gated,full", "window": 8} | changes)


@pytest.mark.long  # test_invariants compares eight devices with one for the built-in mixers
def test_it_trains_on_eight_devices_as_on_one():
    cfg = dataclasses.replace(small.config(), model=gated())
    rows = [small.random_rows(cfg, seed) for seed in range(3)]
    small.assert_same_run(small.train(small.mesh_config(cfg, 2, 2, 2), rows), small.train(cfg, rows))


@pytest.mark.parametrize("more", [{}, {"residual": "mhc-layer", "conv_taps": 3}], ids=["plain", "nash"])
def test_cached_decoding_is_the_full_pass(more):
    cfg = gated(**more)
    model, T = jax.device_put(small.generic_model(cfg)), 21
    tokens_BT = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T), np.int32)

    @jax.jit
    def decoded(model, tokens_BT):
        step = lambda cache, tokens_B: LM.decode(model, cache, tokens_B)[::-1]
        return jnp.swapaxes(jax.lax.scan(step, LM.empty_cache(cfg, 2, T), tokens_BT.T)[1], 0, 1)

    whole = jax.jit(lambda model, tokens_BT: model(tokens_BT, execution=Execution(attention="reference")))
    np.testing.assert_allclose(decoded(model, tokens_BT), whole(model, tokens_BT), rtol=1e-4, atol=1e-4)
    cache = jax.eval_shape(lambda: LM.empty_cache(cfg, 2, T))
    assert [each.mixer.k_LBKSH.shape[3] for each in cache.layers] == [8, T]  # rows that the windows see


@pytest.mark.long
def test_its_memory_is_planned_within_15_percent_of_the_compiler():
    cfg = dataclasses.replace(small.config(data__batch_size=64), model=gated(width=128, ffn=384, layers=12))
    cfg = small.mesh_config(cfg, 2, 2, 2)
    devices, step = small._compiled(cfg)
    batch = abstract_batch(cfg.data, cfg.train.grad_accum, devices)
    found = step.compile(sharded_abstract_state(cfg, devices), batch).memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    assert estimate(cfg, cfg.mesh.axes).total == pytest.approx(held, rel=0.15)


def test_it_is_benchmarked_part_by_part():
    cfg = dataclasses.replace(small.config(), model=gated())
    mesh = make_mesh(cfg.mesh)
    args = (
        abstract_state(dataclasses.replace(cfg, model=one_group(cfg.model))).model,
        abstract_batch(cfg.data, cfg.train.grad_accum, mesh),
    )
    with jax.set_mesh(mesh):
        parts, _ = parts_and_arrays(cfg, lambda walk: jax.eval_shape(walk, *args))
    times = {name: part.times for name, part in parts.items()}
    assert times["mixer-gated-8"] == 2 and times["mixer-attention-full"] == 2
    assert times["ffn-swiglu"] == 4 and times["update-layers"] == 1 and "mixer-attention-8" not in times
    flops = sum(part.times * (part.flops + part.flops_backward) for part in parts.values())
    tokens = cfg.data.batch_size * cfg.data.seq_len
    assert flops == pytest.approx(flops_per_token(cfg.model, cfg.data.seq_len // DOCUMENTS) * tokens, rel=0.05)


def test_each_layer_of_a_pattern_has_parameters_of_its_own():
    shapes = {
        name: leaf.shape for name, leaf in named_leaves(jax.eval_shape(lambda: LM.init(gated(), key=jax.random.key(0)))).items()
    }
    assert shapes["layers[0].attention.gate_DN"] == (2, 32, 8) and shapes["layers[1].attention.q_DNH"] == (2, 32, 8, 4)
    assert "layers[1].attention.gate_DN" not in shapes


def test_windows_alone_keep_one_stack_and_its_names():
    pattern = dataclasses.replace(small.MODEL, layers=4, pattern="local,full", window=8)
    every = dataclasses.replace(small.MODEL, layers=4, full_every=2, window=8)
    assert pattern.group == every.group
    of = lambda cfg: list(named_leaves(jax.eval_shape(lambda: LM.init(cfg, key=jax.random.key(0)))))
    assert of(pattern) == of(small.MODEL)


def test_flops_are_the_sum_over_layers():
    of = lambda pattern, layers: flops_per_token(dataclasses.replace(gated(), pattern=pattern, layers=layers), 32)
    output = 6.0 * small.MODEL.vocab_size * small.MODEL.width
    assert of("gated*2,full", 6) == pytest.approx(of("gated", 4) + of("full", 2) - output)


def test_exporting_it_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^gated: the exported model code does not support this block"):
        tensors(gated())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pattern": "gatd,full"}, "'gatd' is not a layer"),
        ({"pattern": "full*0"}, r"'full\*0' is not a layer"),
        ({"pattern": "local,full/moe"}, "'local,full/moe'.*FFN is one of swiglu"),
        (
            {"pattern": "local*4,full"},
            r"layers 4 is not a multiple of the 5 layers in model.pattern .*; the nearest multiple is",
        ),
        ({"pattern": "local,full", "full_every": 2}, "set model.full_every 0"),
        ({"pattern": None, "mixer": "attention", "scales": 2, "window": None}, "model.scales 2 .*set model.scales 1"),
        ({"pattern": None, "mixer": "multiscale"}, "set model.scales 2"),
        ({"ffn_kind": "relu"}, "model.ffn_kind must be one of swiglu"),
    ],
)
def test_a_pattern_that_makes_no_model_is_refused(changes, error):
    with pytest.raises(ConfigError, match=error):
        dataclasses.replace(gated(), **changes)
