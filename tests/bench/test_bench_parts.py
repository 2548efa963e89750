"""`bench parts`: the parts are those of the model, what they need at least is counted right, and the figures follow."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import small

from nash_mhc.bench import __main__ as command
from nash_mhc.bench import parts as bench
from nash_mhc.bench import step, step_parts
from nash_mhc.bench.parts import bench_parts, step_ms
from nash_mhc.bench.step_parts import lower_bound, one_group, parts_and_arrays
from nash_mhc.config import ConfigError
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import LoraConfig, ObjectiveConfig
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.model.architectures import for_platform
from nash_mhc.model.layer import residual_class
from nash_mhc.model.mixers.attention import attention_layout
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.parallel.sharding import for_compute
from nash_mhc.runtime.hardware import memory_rate
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.state import abstract_state

NASH = dataclasses.replace(small.config(train__grad_accum=2), model=small.NASH)


def abstract(cfg):
    """Parts, and shapes in the place of arrays: nothing is compiled."""
    mesh = make_mesh(cfg.mesh)
    args = (
        abstract_state(dataclasses.replace(cfg, model=one_group(cfg.model))).model,
        abstract_batch(cfg.data, cfg.train.grad_accum, mesh),
    )
    with jax.set_mesh(mesh):
        return parts_and_arrays(cfg, lambda walk: jax.eval_shape(walk, *args))


def times(cfg):
    return {name: part.times for name, part in abstract(cfg)[0].items()}


def test_all_parts_of_a_model_are_there_as_often_as_a_step_has_them():
    inside = {"mhc-read": 8, "norm": 2, "conv": 4, "mixer-multiscale-8": 4, "mhc-write": 8, "ffn-swiglu": 4}
    assert times(NASH) == {"embedding": 2} | inside | {"loss": 2, "update-layers": 1, "update-others": 1}
    dense = times(small.config())
    assert dense == {
        "embedding": 1, "norm": 5, "mixer-attention-full": 2, "add": 4, "ffn-swiglu": 2, "loss": 1, "update-layers": 1,
        "update-others": 1,
    }  # fmt: skip
    mixed = times(dataclasses.replace(small.config(), model=dataclasses.replace(small.MODEL, layers=6, window=8, full_every=3)))
    assert (mixed["mixer-attention-8"], mixed["mixer-attention-full"]) == (4, 2)


@pytest.mark.parametrize("kind", ["nash", "dense", "adapters"])
def test_their_matrix_work_is_that_of_the_model(kind, monkeypatch):
    monkeypatch.setattr(step_parts, "DOCUMENTS", 1)  # as MFU counts: a row is one
    long = small.config(data__seq_len=1024)
    cfg = long if kind == "dense" else dataclasses.replace(NASH, data=long.data, lora=LoraConfig(rank=2 * (kind == "adapters")))
    parts, _ = abstract(cfg)
    flops = sum(part.times * (part.flops + part.flops_backward) for part in parts.values())
    tokens = cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
    assert flops == pytest.approx(flops_per_token(cfg) * tokens, rel=3e-3)
    without = {"update-layers", "embedding" if kind == "adapters" else "update-others"}
    assert {name for name, part in parts.items() if not part.has_gradient} == without


def test_the_least_bytes_are_those_of_the_design():
    """In arrays [B, T, D], of `1b`: what is small beside them is left out."""
    cfg = for_platform(parse(["--model-size", "1b", "--dtype", "bfloat16", "--model-vocab-size", "65536"]).config, "cpu")
    parts, given = abstract(cfg)
    unit = 8 * 4096 * 2048 * 2
    count = lambda name, backward: lower_bound(parts[name], given[name], backward=backward).bytes / unit
    assert count("mhc-write", False) == pytest.approx(4 + 1 + 4, rel=0.01)
    assert count("mhc-write", True) == pytest.approx(9 + 4 + 4 + 1 + 1, rel=0.01)  # gradients in, both again, dy out
    # What was read and what was written come back to the streams in one pass, which reads them again.
    assert count("mhc-read", True) == pytest.approx(5 + 4 + 1 + 4 + 4, rel=0.01)
    assert count("norm", True) == pytest.approx(2 + 3, rel=0.01)
    assert count("embedding", False) == pytest.approx(2 + 1, rel=0.01)  # as many rows as there are tokens, in float32
    assert parts["update-layers"].times == 4  # of four layers each
    assert count("update-layers", False) == pytest.approx(4 * 2 * (4 + 3) * 50.9e6 * 4 / 2 / unit, rel=0.02)
    table = 65_536 * 2048 * 4
    assert count("update-others", False) == pytest.approx(2 * (4 + 3) * table / unit, rel=0.01)
    ffn = parts["ffn-swiglu"]
    assert (ffn.flops, ffn.flops_backward) == (6 * 32_768 * 2048 * 5504, 12 * 32_768 * 2048 * 5504)


def test_they_come_to_what_the_layer_computes():
    cfg, mesh = dataclasses.replace(NASH, train=small.config().train), make_mesh(small.config().mesh)
    model, batch = (
        small.generic_model(one_group(cfg.model)),
        to_device(bench.random_rows(cfg.data, 1, cfg.model.vocab_size), mesh),
    )

    def both(walk):
        def compared(model, batch):
            given, segments_BT = walk(model, batch), batch.segments[0]
            layer = for_compute(jax.tree.map(lambda a: a[0], model.layers), "float32")
            layout = attention_layout(segments_BT.shape, segments_BT, cfg.model.strides, "xla", 2)
            state = residual_class(cfg.model).enter(cfg.model, given["embedding"].out)
            read_BTD, maps = layer.attention_residual.read(state, layer.attention_norm)
            mixed_BTD = layer.attention(layer.attention_conv(read_BTD, segments_BT), layout, window=8, kernel="xla")
            written = layer.attention_residual.write(state, mixed_BTD, maps)
            return (given["mhc-write"].out.xs, given["ffn-swiglu"].out), (written.xs, layer.ffn(read_BTD))

        with jax.set_mesh(mesh):
            return jax.jit(compared)(model, batch)

    _, (ours, theirs) = parts_and_arrays(cfg, both)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


SIZE = "--model-width 32 --model-ffn 64 --model-window none --model-scales 1 --model-conv-taps 0 --seq-len 32".split()


def run(monkeypatch, *words):
    rate = step.matmul_rate  # what it comes to is no matter, and for two seconds it is what this would wait for
    monkeypatch.setattr(step, "matmul_rate", lambda dtype, device, seconds: rate(dtype, device, seconds=0.02))
    monkeypatch.setattr("sys.argv", ["bench", "parts", *words, "--seconds", "0.01"])
    assert command.main() == 0


def test_figures_follow_from_one_another(monkeypatch, tmp_path, capsys):
    """The whole of it, of a dense model."""
    file = tmp_path / "parts.json"
    run(monkeypatch, *SIZE, *"--model-residual plain --batch-size 2 --unroll no --remat dots --json".split(), str(file))
    figures, shown = json.loads(file.read_text()), capsys.readouterr().out
    rows = figures["parts"]
    assert [row["lost_ms_per_step"] for row in rows] == sorted((row["lost_ms_per_step"] for row in rows), reverse=True)
    for row in rows:
        by_bytes = 1e3 * row["gb"] / figures["memory_gb_per_s"]
        by_flops = row["gflop"] / figures["matmul_tflops_per_s"]
        assert row["floor_ms"] == pytest.approx(max(by_bytes, by_flops)), row
        assert row["bound_by"] == ("matmul" if by_flops > by_bytes else "memory")
        assert 0 < row["forward_floor_ms"] <= row["floor_ms"]
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms"])
        assert row["ms_per_step"] == pytest.approx(row["ms"] * row["times"])
        assert row["lost_ms_per_step"] == pytest.approx(row["ms_per_step"] - row["floor_ms"] * row["times"])
        assert f" {row['part']} " in shown
    assert figures["parts_ms"] == pytest.approx(sum(row["ms_per_step"] for row in rows))
    assert figures["rest_ms"] == pytest.approx(figures["step_ms"] - figures["parts_ms"])
    assert figures["step_ms_is"] == "measured"  # two layers are few
    assert figures["step_ms"] > 0


def test_only_the_parts_that_are_asked_for(monkeypatch, tmp_path, capsys):
    file = tmp_path / "parts.json"
    run(monkeypatch, *SIZE, "--batch-size", "1", "--parts", "mhc-write,update-layers", "--json", str(file))
    figures = json.loads(file.read_text())
    rows = {row["part"]: row for row in figures["parts"]}
    assert rows.keys() == {"mhc-write", "update-layers"}
    assert rows["mhc-write"]["ms"] > 0
    assert rows["mhc-write"]["forward_ms"] > 0
    assert rows["update-layers"]["ms"] == rows["update-layers"]["forward_ms"]  # there is no way back
    assert "step_ms" not in figures  # without the others, the rest says nothing
    assert "Largest loss: " in capsys.readouterr().out


def test_the_step_of_a_deep_model_follows_from_two_shallow_ones():
    """Whose layers all take the same time, and the loss and the tables theirs."""
    asked = []
    measure = lambda model: asked.append(model.layers) or 3.0 + 2.0 * model.layers
    of = lambda **model: dataclasses.replace(small.NASH, **model)
    assert step_ms(of(layers=12), "yes", measure) == (27.0, "from 1 and 2 layers")
    assert step_ms(of(layers=12, full_every=2), "no", measure) == (27.0, "from 4 and 8 layers")
    assert step_ms(of(layers=3), "no", measure) == (9.0, "measured")
    assert asked == [1, 2, 4, 8, 3]


def test_what_cannot_be_taken_apart_is_one_line(monkeypatch):
    def refused(message, cfg, **options):
        with pytest.raises(ConfigError, match=message):
            bench_parts(cfg, **options)

    refused("--parts ffn-swglu: .*did you mean ffn-swiglu", small.config(), only="norm,ffn-swglu")
    refused("nash-mhc, not reservoir", dataclasses.replace(small.config(), model=ReservoirConfig()))
    refused("the mesh has 2", small.mesh_config(small.config(), data=2))
    monkeypatch.setattr("sys.argv", ["bench", "parts", "--seconds", "0"])
    with pytest.raises(ConfigError, match="--seconds 0 must be above 0"):
        command.main()
    distilled = dataclasses.replace(small.config(), objective=ObjectiveConfig(name="distill"))
    refused("--objective next_token, not distill", distilled)


def test_the_memory_s_rate_is_one_that_a_memory_may_have():
    assert 1e8 < memory_rate(jax.devices("cpu")[0], seconds=0.05) < 1e13
