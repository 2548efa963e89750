"""Whole runs: files, resuming, equality, the Python API."""

import dataclasses
import json
import math
import threading
import time

import jax
import pytest
import small
from runs import RUN, assert_equal_states, at, rows

from nash_mhc.checkpoint.run_folder import make_run_folder
from nash_mhc.config import ConfigError, presets
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.runtime.compiled import CompiledStep, Program
from nash_mhc.train import evaluate, run
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.state import ProgramKey

ROW = {
    "step", "loss", "objective", "loss/sparsity", "lr", "grad_norm", "tokens_per_s", "tokens_seen", "step_ms",
    "data_wait_ms", "save_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("unbroken") / "run")


def test_a_run_leaves_a_row_a_log_interval_with_every_figure(unbroken):
    logged = rows(unbroken.folder)
    assert [r["step"] for r in logged] == [2, 4, 6]
    assert all(set(r) >= ROW for r in logged)
    assert all(math.isfinite(v) for r in logged for v in r.values())
    assert 0 < logged[-1]["tokens_seen"] <= 6 * 8 * 32


def test_the_loss_is_evaluated_on_the_held_out_split(unbroken):
    evaluated = rows(unbroken.folder, "eval.jsonl")
    assert [r["step"] for r in evaluated] == [3, 6]
    last = evaluated[-1]
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/loss"]))
    assert 0 <= last["eval/accuracy"] <= 1
    # A byte is a token, and the end of a document is no byte: nats / ln 2, or a little more.
    assert 0.9999 < last["eval/bits_per_byte"] / (last["eval/loss"] / math.log(2)) < 1.05
    assert unbroken.evaluation["eval/loss"] == last["eval/loss"]
    assert unbroken.floor is not None
    assert last["eval/loss"] > unbroken.floor[0]


def test_the_first_steps_do_not_wait_for_the_program_of_the_evaluation(unbroken, tmp_path, monkeypatch):
    """The evaluation compiles after the step, while steps run; the first evaluation waits for it."""
    evaluate._evaluation.cache_clear()  # compile it again; the step stays cached
    begin, two_steps_done, waited = CompiledStep.compile_in_background, threading.Event(), []

    def held_up(step, state, batch, after=None):
        def open_the_gate():
            after.result()
            waited.append(two_steps_done.wait(60.0))
            gate.set_result(None)

        if after is None:
            return begin(step, state, batch)
        gate = Program()
        threading.Thread(target=open_the_gate).start()
        return begin(step, state, batch, after=gate)

    monkeypatch.setattr(CompiledStep, "compile_in_background", held_up)
    result = at(tmp_path / "run", each_step=lambda step: two_steps_done.set() if step == 2 else None)
    assert waited == [True]
    assert result.evaluation == unbroken.evaluation


def test_run_json_tells_what_ran(unbroken):
    told = json.loads((unbroken.folder / "run.json").read_text())
    assert told["config"]["model"]["width"] == 32
    assert told["config"]["train"]["dtype"] == "float32"
    assert told["parameters"] == sum(x.size for x in jax.tree.leaves(unbroken.state.model))
    assert told["mesh"] == {"data": 1, "fsdp": 1, "tp": 1}
    assert {"jax", "equinox", "python", "nash_mhc"} <= set(told["versions"])
    assert told["devices"]["platform"] == "cpu"


def test_every_parameter_is_listed_by_name(unbroken):
    table = (unbroken.folder / "parameters.txt").read_text()
    assert "layers.attention.q_DNH" in table
    assert f"{sum(x.size for x in jax.tree.leaves(unbroken.state.model)):,}" in table


def test_a_kernel_of_another_platform_is_refused_before_anything_is_made(tmp_path):
    cfg = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, attention="cudnn"))
    with pytest.raises(ConfigError, match=r"--attention cudnn.*gpu.*not on cpu"):
        at(tmp_path / "run", cfg)
    assert not (tmp_path / "run").exists()


def test_a_stopped_and_continued_run_is_bit_for_bit_the_unbroken_one(unbroken, tmp_path):
    at(tmp_path / "run", total_steps=3)
    resumed = at(tmp_path / "run")
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    # The shorter run also logged its last step, so its rows average the same losses over other steps.
    got, want = rows(tmp_path / "run"), rows(unbroken.folder)
    assert [(r["step"], r["steps"]) for r in got] == [(2, 2), (3, 1), (4, 1), (6, 2)]
    assert [got[0]["loss"], got[-1]["loss"]] == [want[0]["loss"], want[-1]["loss"]]
    assert min(got[1]["loss"], got[2]["loss"]) < want[1]["loss"] < max(got[1]["loss"], got[2]["loss"])
    assert rows(tmp_path / "run")[-1]["tokens_seen"] == rows(unbroken.folder)[-1]["tokens_seen"]


def test_a_run_continues_on_another_mesh_from_another_folder(unbroken, tmp_path):
    first = at(tmp_path / "first", total_steps=3)
    moved = small.mesh_config(RUN, 2, 2, 2)
    second = at(tmp_path / "second", moved, resume_from=str(first.folder))
    assert int(second.state.step) == 6
    assert_equal_states(second.state.model, unbroken.state.model, rtol=1e-3, atol=1e-5)
    assert second.evaluation["eval/loss"] == pytest.approx(unbroken.evaluation["eval/loss"], rel=1e-4)


def test_a_finished_run_takes_no_step_and_says_so(unbroken, capsys):
    before = [(unbroken.folder / name).read_text() for name in ("metrics.jsonl", "eval.jsonl")]
    again = run(
        dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, checkpoint_dir=str(unbroken.folder))), quiet=False
    )
    assert int(again.state.step) == 6
    assert [(unbroken.folder / name).read_text() for name in ("metrics.jsonl", "eval.jsonl")] == before
    assert "all 6 steps are already done; raise --total-steps" in capsys.readouterr().out


def test_another_model_in_a_used_folder_is_refused_by_name(unbroken):
    with pytest.raises(ConfigError, match=r"holds another run: model\.ffn \(64 in that run, 32 in this command\)"):
        at(unbroken.folder, small.config(model__ffn=32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data__seq_len": 64}, r"data\.seq_len \(32 in that run, 64 in this command\)"),
        ({"train__seed": 5}, r"train\.seed \(0 in that run, 5 in this command\)"),
        ({"data__batch_size": 16}, r"batch-size x grad-accum \(8 in that run, 16 in this command\)"),
    ],
)
def test_a_continued_run_must_read_on_where_it_stopped(unbroken, change, named):
    with pytest.raises(ConfigError, match=named):
        at(unbroken.folder, small.config(**change))


def test_a_new_run_never_takes_a_folder_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    assert [str(make_run_folder(None, RUN.model_size)) for _ in range(3)] == [
        "runs/tiny-now",
        "runs/tiny-now-2",
        "runs/tiny-now-3",
    ]


def test_a_small_held_out_split_is_read_once_and_whatever_the_seed(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text.\n" for i in range(500)))
    data = dataclasses.replace(RUN.data, dataset=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer("bytes")
    held_out = open_source(data, tokenizer, split="validation", seed=0)
    for seed in (0, 1):
        cfg = dataclasses.replace(RUN, data=data, train=dataclasses.replace(RUN.train, seed=seed))
        mesh, size = small.make_mesh(cfg.mesh), cfg.data.batch_size
        evaluator = Evaluator(ProgramKey.of(cfg), held_out, tokenizer, mesh, batch_size=size, batches=99)
        rows = [row for batch in evaluator._rows for row in zip(*(a[0] for a in batch), strict=True)]
        weighted = [inputs.tobytes() for inputs, _, _, weights in rows if weights.any()]
        assert sorted(weighted) == sorted(held_out[i].inputs.tobytes() for i in range(len(held_out)))
        assert len(rows) % 8 == 0


def test_data_that_has_changed_is_not_read_on(tmp_path):
    file = tmp_path / "text.txt"
    text = "".join(f"line {i} of the text.\n" for i in range(500))
    file.write_text(text)
    data = dataclasses.replace(RUN.data, dataset=f"{file}:0.5,stories:0.5", cache_dir=str(tmp_path / "cache"))
    cfg = dataclasses.replace(RUN, data=data)
    at(tmp_path / "run", cfg, total_steps=2)
    logged = rows(tmp_path / "run")[-1]
    assert (
        0
        < logged[f"epochs/{file}"]
        == pytest.approx(8 / len(open_source(data, load_tokenizer("bytes"), split="train", seed=0)._sources[0]))
    )
    at(tmp_path / "run", cfg, total_steps=3)
    file.write_text(text.replace("line 7", "line 8"))
    with pytest.raises(ConfigError, match=r"the data of --dataset .* has changed since this run began; .*--init-from"):
        at(tmp_path / "run", cfg, total_steps=4)
    file.write_text(text)
    assert int(at(tmp_path / "run", cfg, total_steps=4).state.step) == 4


def test_switching_ema_on_in_a_used_folder_is_refused(unbroken):
    cfg = dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, ema_decay=0.9))
    with pytest.raises(ConfigError, match=r"holds another run: optim\.ema_decay \(0\.0 in that run, 0\.9 in this command\)"):
        at(unbroken.folder, cfg)


@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_ema_weights_are_evaluated_too(tmp_path, weights):
    cfg = dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, ema_decay=0.5))
    cfg = dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, weights_dtype=weights))
    result = at(tmp_path / "run", cfg, total_steps=2)
    assert result.evaluation["eval/loss_ema"] != result.evaluation["eval/loss"]


def test_the_default_preset_is_a_whole_run():
    cfg = presets.run()
    assert cfg.model_size == "tiny"
    assert cfg.train.total_steps > cfg.optim.warmup_steps
