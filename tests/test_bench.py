"""The benchmark times the real step and reports consistent figures."""

from types import SimpleNamespace

import jax
import pytest
import small
from jax.experimental import topologies

from nash_mhc.bench.aot import bench_compile
from nash_mhc.bench.step import bench_step
from nash_mhc.config import ConfigError
from nash_mhc.model.lm import flops_per_token
from nash_mhc.train.hardware import known_peak


def test_figures_follow_from_one_another():
    cfg = small.config()
    figures = bench_step(cfg, steps=2, warmup=1)
    seconds = figures["step_ms"] / 1e3
    tokens = cfg.data.batch_size * cfg.data.seq_len
    assert figures["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert figures["tflops_per_s"] == pytest.approx(flops_per_token(cfg.model, cfg.data.seq_len) * tokens / seconds / 1e12)
    assert figures["share_of_matmul"] == pytest.approx(figures["tflops_per_s"] / figures["matmul_tflops_per_s"])
    assert figures["step_ms_min"] <= figures["step_ms"] <= figures["step_ms_max"]
    assert figures["compile_s"] > 0
    assert figures["peak_memory_gib"] > 0
    assert figures["last_loss"] < figures["first_loss"]  # it really trains, on the one batch it is given
    assert figures["finite"]


def test_a_topology_that_cannot_be_described_is_one_line(monkeypatch):
    def absent(**_):
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    with pytest.raises(ConfigError, match=r"^--topology v6e:2x4: cannot be described here \(no compiler\); it needs libtpu"):
        bench_compile(small.mesh_config(small.config(), 2, 2, 2), "v6e:2x4")


def test_a_mesh_that_does_not_fill_the_topology_is_refused(monkeypatch):
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=[None] * 8))
    with pytest.raises(ConfigError, match="has 8 chips; the three mesh axes must multiply to that"):
        bench_compile(small.mesh_config(small.config(), 2, 2, 1), "v6e:2x4")


def test_compiling_for_a_topology_reports_memory_and_collectives(monkeypatch):
    """The whole path with host devices in the place of chips: bfloat16, the mesh's own shardings, figures that add up."""
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: SimpleNamespace(devices=jax.devices()))
    monkeypatch.setattr(topologies, "make_mesh", lambda described, shape, names: jax.make_mesh(shape, names))
    cfg = small.mesh_config(small.config(train__dtype="auto", train__attention="xla"), 2, 2, 2)
    figures = bench_compile(cfg, "v6e:2x4")
    assert figures["topology"] == "v6e:2x4, mesh 2x2x2 (data x fsdp x tp)"
    assert figures["peak_gib_per_chip"] >= figures["state_and_batch_gib"] > 0
    assert "all-gather" in figures["collectives"]
    assert figures["compile_s"] > 0


def test_peaks_are_those_of_the_named_chip():
    kinds = (
        "NVIDIA H200",
        "NVIDIA GB200",
        "NVIDIA B200",
        "NVIDIA L40",
        "NVIDIA L4",
        "TPU v5",
        "TPU v5 lite",
        "TPU v6 lite",
        "cpu",
    )
    assert [known_peak(k) for k in kinds] == [989, 2450, 2250, 181, 121, 459, 197, 918, None]
