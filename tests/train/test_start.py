"""Starting `train`: settings from directories, first lines, records, and commands that resume."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import small
from corpora import prepared, save_tokenizer, stories, write_jsonl
from runs import RUN, at, drawn_run

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import parsing
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import ByteTokenizer, load_tokenizer
from nash_mhc.train import __main__ as train
from nash_mhc.train import run
from nash_mhc.train.inferred_settings import infer_settings, recorded_settings
from nash_mhc.train.resume import check_resume

OTHER = dataclasses.replace(  # differs from the preset in most sections
    small.config(
        data__seq_len=48, data__batch_size=6, optim__learning_rate=3e-3, optim__schedule="wsd", train__grad_accum=2,
        train__epochs=None, train__total_steps=70, telemetry__sample_prompt="It was",
    ),
    model=dataclasses.replace(small.MODEL, width=24, vocab_size=260),
)  # fmt: skip


def parsed(*argv):
    return parsing.parse(
        [str(word) for word in argv], found=infer_settings, folder="train.checkpoint_dir", recorded=recorded_settings
    )


def typed(monkeypatch, capsys, *argv):
    """Run `train` with these arguments; return (exit code, stdout)."""
    monkeypatch.setattr(sys, "argv", ["train", *map(str, argv)])
    return train.main(), capsys.readouterr().out


def made(folder, cfg):
    """A run with a checkpoint and non-default settings, as this version records them."""
    drawn_run(folder, cfg)
    info = json.loads((folder / "run.json").read_text()) | {"settings": cfg.to_dict()}
    (folder / "run.json").write_text(json.dumps(info, indent=2))
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return made(tmp_path_factory.mktemp("other") / "run", OTHER)


def test_a_folder_alone_brings_the_settings_of_its_run(other):
    here = dataclasses.replace(OTHER.train, checkpoint_dir=str(other))
    for argv in ([other], ["--checkpoint-dir", other], [f"checkpoint_dir={other}"]):
        assert parsed(*argv).config == dataclasses.replace(OTHER, train=here)
    assert parsed(other).origins["model.width"] == f"the run {other}"
    assert parsed(other).given == {"train.checkpoint_dir": str(other)}


def test_flags_lie_on_top_of_what_a_run_has_recorded(other):
    cfg = parsed(other, "--total-steps", "90", "learning_rate=1e-4", "--no-model-qk-norm").config
    assert (cfg.train.total_steps, cfg.optim.learning_rate, cfg.optim.schedule) == (90, 1e-4, "wsd")
    assert (cfg.model.width, cfg.model.qk_norm) == (24, False)
    assert parsed(other, "--total-steps", "1").config.train.total_steps == 1  # fewer than its warm-up
    # Another size is another run: no setting is inherited, and `train` refuses it.
    assert parsed(other, "--model-size", "small").config.model.width != 24


def test_a_folder_alone_knows_its_kind_of_model(tmp_path):
    cfg = parsed("--model-kind", "reservoir", "--model-width", "40").config
    (tmp_path / "run").mkdir()
    info = {"config": cfg.to_dict(), "settings": cfg.to_dict(), "rows": "none", "parameters": 1}
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    for argv in ([tmp_path / "run"], ["--mesh-auto", tmp_path / "run"], ["--seed", "1", tmp_path / "run"]):
        found = parsing.parse(
            list(map(str, argv)), own=train._own_flags, folder="train.checkpoint_dir", recorded=recorded_settings
        ).config
        assert found.model == cfg.model


def test_what_depends_on_a_start_or_on_the_devices_is_not_taken_over(tmp_path):
    """As an earlier version recorded it: with all settings resolved."""
    info = {"config": OTHER.to_dict(), "rows": "none", "parameters": 1}
    info["config"]["mesh"] |= {"data": 4, "platform": "gpu", "num_processes": 2, "process_id": 1, "coordinator_address": "a:1"}
    info["config"]["train"] |= {"attention": "cudnn", "unroll": "yes", "dtype": "bfloat16", "resume": "must"}
    info["config"]["telemetry"] |= {"log_format": "json"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    for argv in ([tmp_path / "run"], ["--config", tmp_path / "run" / "run.json"]):
        cfg = parsed(*argv).config
        assert (cfg.model, cfg.mesh, cfg.optim) == (OTHER.model, RunConfig().mesh, OTHER.optim)
        for name in ("attention", "unroll", "dtype", "resume"):
            assert getattr(cfg.train, name) == getattr(parsed().config.train, name)
        assert cfg.telemetry.log_format == "text"


def test_a_run_json_is_a_file_of_settings(other):
    file = other / "run.json"
    assert parsed("--config", file).config == OTHER
    origin = parsed("--config", file).origins["model.width"]
    assert origin.startswith(f"{file}:") and "24" in file.read_text().splitlines()[int(origin.rpartition(":")[2]) - 1]
    assert parsed("--config", file, "--seed", "3").config.train.seed == 3


# --- a run that is started for real ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return at(tmp_path_factory.mktemp("trained") / "run", evaluated=False).folder


def test_a_start_says_what_it_trains_on_and_records_what_continues_it(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)  # no evaluation to compile
    folder = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setenv("TPU_NUM_DEVICES", "4")
    code, out = typed(monkeypatch, capsys, folder)
    assert code == 0 and "all 6 steps are already done" in out
    assert "TPU_NUM_DEVICES=4 is ignored; use --num-devices 4" in out
    assert "\ndata: stories (" in out and "; tokenizer bytes, 257 tokens\n" in out
    assert "\nbatch: 8 sequences/step of 32 tokens, 256 tokens/step; 1 microbatch, 8 sequences per device\n" in out
    code, out = typed(monkeypatch, capsys, folder, "--total-steps", "7", "--batch-size", "4", "--grad-accum", "2")
    assert code == 0
    assert "; 2 microbatches, 4 sequences per device in each\n" in out
    assert RunFolder(folder).steps()[-1] == 7
    commands = json.loads((folder / "run.json").read_text())["commands"]
    assert [shlex.split(command)[2:] for command in commands] == [
        ["nash_mhc.train", str(folder)],
        ["nash_mhc.train", str(folder), "--total-steps", "7", "--batch-size", "4", "--grad-accum", "2"],
    ]
    # The proposed command has ten times the steps, and otherwise the recorded settings.
    (longer,) = [shlex.split(line, comments=True) for line in out.splitlines() if "--total-steps" in line]
    cfg = parsed(*longer[3:]).config
    assert cfg.train.total_steps == 70
    assert (cfg.model, cfg.data.batch_size, cfg.train.grad_accum) == (RUN.model, 4, 2)


def test_the_batch_must_stay_and_the_grad_accum_that_keeps_it_is_named(trained):
    for batch, accum, remedy in ((4, 1, (4, 2)), (2, 2, (2, 4)), (5, 1, (8, 1))):
        cfg = small.config(data__batch_size=batch, train__grad_accum=accum, train__checkpoint_dir=str(trained))
        cfg = dataclasses.replace(cfg, optim=RUN.optim)
        with pytest.raises(ConfigError, match=rf"--batch-size {remedy[0]} --grad-accum {remedy[1]} ") as refused:
            check_resume(cfg, rows="stories-2")
        assert "batch-size x grad-accum (8 in that run" in str(refused.value)


def test_a_folder_without_a_finished_checkpoint_is_no_other_run(trained, tmp_path):
    """Without a complete checkpoint, the directory accepts another shape, batch, length and seed."""
    folder = shutil.copytree(trained, tmp_path / "run")
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    (folder / "metrics.jsonl").write_text(json.dumps({k: v for k, v in row.items() if k != "last_checkpoint"}) + "\n")
    cfg = small.config(
        model__ffn=32, data__batch_size=4, data__seq_len=16, train__seed=3, train__checkpoint_dir=str(folder),
        optim__warmup_steps=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="holds another run"):
        run(cfg, quiet=True)
    for step in RunFolder(folder).steps():
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "checkpoints" / "2").mkdir()  # a save that did not finish
    (folder / "checkpoints" / "2.saving").touch()
    assert parsed(folder, "--tokenizer", "bytes").config.model.vocab_size == 257
    check_resume(cfg, rows="another")
    # A damaged checkpoint could be restored: the directory still belongs to that run.
    (folder / "checkpoints" / "2.saving").unlink()
    with pytest.raises(ConfigError, match="holds another run"):
        check_resume(cfg, rows="another")


# --- starting from another run ---------------------------------------------------------------------------------------


def test_a_run_that_starts_from_another_one_takes_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Once upon a time.\n\n" * 50)
    (tmp_path / "b.txt").write_text("Another text.\n\n" * 50)
    data = dataclasses.replace(OTHER.data, dataset="a.txt", validation_fraction=0.2, batch_size=5, num_workers=1)
    made(tmp_path / "base", dataclasses.replace(OTHER, data=data))
    for flag in ("--init-from", "--resume-from"):
        found = parsed(flag, "base")
        assert (found.config.data.dataset, found.config.data.validation_fraction) == ("a.txt", 0.2)
        assert found.origins["data.dataset"] == f"{flag} base"
        assert (found.config.data.batch_size, found.config.data.num_workers) == (8, 0)  # settings of reading are not inherited
        other = parsed(flag, "base", "--dataset", "b.txt").config.data
        assert (other.dataset, other.validation_fraction) == ("b.txt", 0.05)


def test_weights_of_another_shape_are_refused_before_anything_is_made(other, tmp_path):
    for changes, named in (
        ({"width": 48}, "model.width (24 in that run, 48 in this command); leave out --model-width"),
        ({"layers": 3, "nash_iterations": 7}, "model.layers (2 in that run, 3 in this command); leave out --model-layers"),
        ({"qk_norm": False}, "model.qk_norm (True in that run, False in this command); leave out --model-qk-norm"),
    ):
        cfg = dataclasses.replace(OTHER, model=dataclasses.replace(OTHER.model, **changes))
        train_ = dataclasses.replace(cfg.train, init_from=str(other), checkpoint_dir=str(tmp_path / "new"))
        with pytest.raises(ConfigError) as refused:
            run(dataclasses.replace(cfg, train=train_), quiet=True)
        assert named in str(refused.value)
        assert not list(tmp_path.iterdir())
    # Settings that do not affect shapes may change.
    cfg = dataclasses.replace(OTHER, model=dataclasses.replace(OTHER.model, rope_theta=5e4, nash_iterations=7))
    check_resume(dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, init_from=str(other))), rows="any")


# --- errors and warnings at the start ---------------------------------------------------------------------------------


def test_a_file_that_replaces_a_flag_before_it_says_so(write, messages):
    file = write("data:\n  batch_size: 4\n  seq_len: 64\n")
    assert parsed("--batch-size", "2", "--seq-len", "64", "--config", file).config.data.batch_size == 4
    (told,) = messages
    assert "run.yaml:2" in told and "--batch-size 2" in told and "--config" in told
    assert parsed("--config", file, "--batch-size", "2").config.data.batch_size == 2
    assert len(messages) == 1


def test_a_refusal_says_which_file_a_setting_is_from(write, monkeypatch, capsys):
    file = write("data:\n  batch_size: 6\nmesh:\n  data: 4\n")
    for words, origin in ((["--config", file], "run.yaml:2"), (["--batch-size", "6", "--mesh-data", "4"], None)):
        with pytest.raises(ConfigError, match="--batch-size 6 cannot be split") as refused:
            typed(monkeypatch, capsys, *words)
        assert str(refused.value).endswith(f"(--batch-size 6 from {origin})") == (origin is not None)
    command = "--batch-size 6: make it anew: python -m nash_mhc.data prepare --batch-size 6"
    told = parsing.with_origins(ConfigError(command), parsed("--config", file))
    assert str(told) == f"(--batch-size 6 from {file}:2) {command}"  # the command comes last


def test_a_rate_that_cannot_train_is_warned_of(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)
    folder = shutil.copytree(trained, tmp_path / "run")
    for rate, warned in (("500", True), ("0.01", False)):
        _, out = typed(monkeypatch, capsys, folder, "--learning-rate", rate)
        assert ("warning: --learning-rate 500" in out) == warned


def test_questions_and_answers_get_a_command_that_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--dataset", "qa.jsonl", "--seq-len", "32"]
    opened = lambda flags: open_source(parsed(*argv, *flags).config.data, ByteTokenizer(), split="train", seed=0)
    for asked, answered in (("question", "answer"), ("instruction", "output"), ("problem", "solution")):
        lines = [json.dumps({"id": n, asked: f"What is {n} + 1?", answered: str(n + 1)}) for n in range(40)]
        (tmp_path / "qa.jsonl").write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=r"no field 'text'") as refused:
            opened([])
        (command,) = re.findall(r"(--format fields .*?); or ", str(refused.value))
        assert len(opened(shlex.split(command))) > 0
    (tmp_path / "qa.jsonl").write_text('{"body": "a"}')
    with pytest.raises(ConfigError, match="--text-field"):
        opened([])


def test_a_folder_that_another_tokenizer_has_prepared_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "tok")
    write_jsonl(tmp_path / "a.jsonl", stories(30))
    prepared(Path("data"), "a.jsonl", load_tokenizer("tok"), align=16, seq_len=64)
    with pytest.raises(ConfigError, match=r"another tokenizer, of 271 tokens in that folder, 257 in this command") as refused:
        prepared(Path("data"), "a.jsonl", ByteTokenizer(), align=16, seq_len=64)
    assert not re.search(r"[{}']|fingerprint", str(refused.value))
