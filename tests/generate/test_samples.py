"""Samples at every evaluation: independent of the mesh, and never a reason to stop training."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
import runs
import small

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.schema import MeshConfig, TelemetryConfig
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.loading.load import load
from nash_mhc.model.sampling import generate_tokens
from nash_mhc.train import __main__ as train_command
from nash_mhc.train import samples
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import ProgramKey, state_shardings

BYTES = load_tokenizer("bytes")
CFG = dataclasses.replace(runs.RUN, telemetry=TelemetryConfig(sample_tokens=12, sample_prompt="Once"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return runs.at(tmp_path_factory.mktemp("samples") / "run", CFG)


def one_device():
    return jax.make_mesh((1, 1, 1), tuple(MeshConfig().axes), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def of_run(mesh, telemetry=CFG.telemetry):
    return Samples(telemetry, CFG.model, mesh, BYTES, CFG.data.seq_len, CFG.train.dtype)


def test_every_evaluation_samples_the_text_that_generate_gives(trained):
    rows = runs.rows(trained.folder, "eval.jsonl")
    assert [row["step"] for row in rows] == [3, 6]
    for row in rows[-1:]:
        model = load(trained.folder, row["step"]).model
        made = generate_tokens(model, [256, *b"Once"], seq_len=32, end=256, max_tokens=12, seed=0)
        assert row["sample"] == BYTES.decode(np.array(list(made)))
    assert trained.sample == rows[-1]["sample"]
    assert 0 < len(rows[-1]["sample"]) <= 12


def test_a_resumed_run_writes_the_same_samples(trained, tmp_path):
    runs.at(tmp_path / "run", CFG, total_steps=3)
    runs.at(tmp_path / "run", CFG)
    again = runs.rows(tmp_path / "run", "eval.jsonl")
    assert [row["sample"] for row in again] == [row["sample"] for row in runs.rows(trained.folder, "eval.jsonl")]


def test_a_sample_of_any_mesh_is_generated_on_one_device(trained, monkeypatch):
    mesh = jax.make_mesh((2, 2, 2), tuple(MeshConfig().axes), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    model = jax.tree.map(jax.device_put, trained.state.model, state_shardings(ProgramKey.of(CFG), mesh).model)
    assert len(model.embed_VD.devices()) == 8
    with jax.transfer_guard("disallow"):  # as in the loop
        assert of_run(mesh).write(model) == trained.sample
    monkeypatch.setattr(samples, "generate_tokens", lambda model, *_, **__: [48 + len(model.embed_VD.devices())])
    assert of_run(mesh).write(model) == "1"
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(samples, "_fits", lambda *_: True)
    assert of_run(mesh).write(model) is None


def test_a_failing_sample_does_not_stop_training(trained, monkeypatch, messages):
    few = of_run(one_device(), TelemetryConfig(sample_tokens=0))
    assert few.write(trained.state.model) is None
    monkeypatch.setattr(samples, "stream_text", lambda tokens, tokenizer: 1 / 0)
    broken = of_run(one_device())
    assert broken.write(trained.state.model) is broken.write(trained.state.model) is None
    assert len(messages) == 1 and "ZeroDivisionError: division by zero" in messages[0]
    monkeypatch.setattr(samples, "_MAX_PARAMETERS", 1000)
    assert of_run(one_device()).write(trained.state.model) is None
    assert len(messages) == 2 and messages[1].startswith("no samples: ")


def test_training_ends_with_a_sample(trained, monkeypatch, capsys):
    (trained.folder / "run.yaml").write_text(json.dumps(CFG.to_dict()))
    monkeypatch.setattr(train_command, "run", lambda cfg, **_: trained)
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(trained.folder / "run.yaml")])
    assert one_line_errors(train_command.main) == 0
    shown = f"\nA sample (temperature 0.8):\n{trained.sample}\n\nThe run is in {trained.folder}. Next:\n"
    assert capsys.readouterr().out.startswith(shown)


def test_without_held_out_text_only_the_end_has_a_sample(tmp_path):
    cfg = small.config(data__validation_fraction=0.0, optim__warmup_steps=0, train__total_steps=1, telemetry__sample_tokens=4)
    (tmp_path / "text.txt").write_text("a b c " * 400)
    data = dataclasses.replace(cfg.data, dataset=str(tmp_path / "text.txt"), cache_dir=str(tmp_path))
    result = runs.at(tmp_path / "run", dataclasses.replace(cfg, data=data))
    assert result.evaluation == {}
    assert result.sample is not None
