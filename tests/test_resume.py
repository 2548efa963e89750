"""Runs that go on: from the last whole checkpoint, exactly; --resume auto, never and must."""

import dataclasses
import re
import shutil

import pytest
from test_checkpoint import data_file, flip
from test_run import RUN, assert_equal_states, at, rows

from nash_mhc.checkpoint import manifest
from nash_mhc.config import ConfigError
from nash_mhc.config.schema import TrainConfig
from nash_mhc.train import run
from nash_mhc.train.resume import check_resume


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("resume") / "run", checkpoint_interval=2)


def test_a_checkpoint_holds_its_own_evaluation(unbroken):
    told = {step: manifest.values_of(unbroken.folder / "checkpoints" / str(step))["evaluation"] for step in (2, 4, 6)}
    assert told == {2: None, 4: None, 6: unbroken.evaluation}


def test_a_checkpoint_holds_position_randomness_and_metrics(unbroken, tmp_path):
    logged = {row["step"]: row for row in rows(at(tmp_path / "run", log_interval=1).folder)}
    for step in (2, 4, 6):
        values = manifest.values_of(unbroken.folder / "checkpoints" / str(step))
        assert values["data"] == {"rows_read": 8 * step, "rows": "stories-2"}
        assert values["rng"] == {"seed": RUN.train.seed, "step": step}
        # The metrics of the step itself, to the last bit; what is measured over several steps is not among them.
        told = values["metrics"]
        once = {"tokens", "skipped", "spike", "empty"}  # of this step; a row counts them over the run
        assert {"loss", "grad_norm", "lr", *once} <= set(told)
        assert all(told[k] == logged[step][k] for k in set(told) - once)


# What the rows of a step, or the function that is trained, follow from; a value that is none of RUN's.
KEPT = {
    **{f"model__{k}": v for k, v in {"width": 48, "ffn": 32, "layers": 3, "rope_theta": 5e4, "norm_eps": 1e-5}.items()},
    "data__dataset": "other.txt", "data__dataset_name": "v2", "data__split": "validation", "data__tokenizer": "other",
    "data__seq_len": 64, "data__text_field": "body", "data__format": "chat", "data__template": "{content}",
    "data__loss_on": "all", "data__max_documents": 9, "data__validation_fraction": 0.1, "data__streaming": True,
    "data__batch_size": 16, "train__grad_accum": 2, "train__seed": 1, "optim__ema_decay": 0.9,
}  # fmt: skip
NAMED = {"data__batch_size": "batch-size x grad-accum", "train__grad_accum": "batch-size x grad-accum"}
FREE = {
    "optim__learning_rate": 1e-3, "optim__schedule": "cosine", "optim__weight_decay": 0.0, "optim__max_grad_norm": 0.0,
    "optim__b2": 0.99, "optim__z_loss": 1e-4, "train__total_steps": 7, "train__log_interval": 1, "train__eval_interval": 0,
    "train__checkpoint_interval": 3, "train__keep_last": 1, "train__dtype": "bfloat16", "train__remat": "full",
    "data__num_workers": 1, "data__worker_buffer_size": 2, "data__eval_split": "validation", "mesh__data": 2,
}  # fmt: skip


def changed(folder, **changes):
    cfg = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, checkpoint_dir=str(folder)))
    for name, value in changes.items():
        section, key = name.split("__")
        cfg = dataclasses.replace(cfg, **{section: dataclasses.replace(getattr(cfg, section), **{key: value})})
    return cfg


@pytest.fixture(scope="module")
def told_by(unbroken, tmp_path_factory):
    """The same run, known from run.json, or from its checkpoints: the newest is unreadable, or the newest will do."""
    folders = {"run.json": unbroken.folder}
    for name in ("checkpoints", "half a run.json"):
        folders[name] = shutil.copytree(unbroken.folder, tmp_path_factory.mktemp("told") / "run")
    (folders["checkpoints"] / "run.json").unlink()
    (folders["checkpoints"] / "checkpoints" / "6" / "values" / "metadata").write_text('{"step": 6, "config": {"mod')
    file = folders["half a run.json"] / "run.json"
    file.write_text(file.read_text()[:200])
    return folders


@pytest.mark.parametrize("source", ["run.json", "checkpoints", "half a run.json"])
def test_what_may_not_change_is_refused_by_name_and_the_rest_is_taken(told_by, source):
    folder = told_by[source]
    for name, value in KEPT.items():
        key = NAMED.get(name, name.replace("__", "."))
        with pytest.raises(ConfigError, match=rf"holds another run: .*{re.escape(key)} \(.* there, .* now\)") as refused:
            check_resume(changed(folder, **{name: value}), rows="stories-2")
        assert str(refused.value).count(" there, ") == 1
    with pytest.raises(ConfigError, match=r"the data of --dataset stories has changed since this run began"):
        check_resume(changed(folder), rows="another")
    for name, value in FREE.items():
        check_resume(changed(folder, **{name: value}), rows="stories-2")
    check_resume(changed(folder, data__batch_size=4, train__grad_accum=2), rows="stories-2")
    # Another run's weights are taken for other data and another batch, but not for another model.
    new = changed(folder.parent / "new", train__resume_from=str(folder), train__seed=5, data__seq_len=64, data__batch_size=2)
    check_resume(new, rows="another")
    with pytest.raises(ConfigError, match=r"model\.ffn \(64 there, 32 now\)"):
        check_resume(dataclasses.replace(new, model=dataclasses.replace(new.model, ffn=32)), rows="another")


def test_a_run_goes_on_with_everything_changed_that_may(unbroken, tmp_path):
    folder = shutil.copytree(unbroken.folder, tmp_path / "run")
    (folder / "run.json").unlink()
    result = run(changed(folder, **FREE | {"data__batch_size": 4, "train__grad_accum": 2, "data__num_workers": 0}), quiet=True)
    assert int(result.state.step) == 7
    assert result.state.model.embed_VD.sharding.mesh.shape["data"] == 2
    values = manifest.values_of(folder / "checkpoints" / "7")
    assert values["data"]["rows_read"] == 7 * 8
    assert rows(folder)[-1]["loss"] < rows(unbroken.folder)[0]["loss"]


def test_a_run_recovers_from_the_checkpoint_before_the_damaged_one_bit_for_bit(unbroken, tmp_path, capsys):
    at(tmp_path / "run", total_steps=4, checkpoint_interval=2)
    flip(data_file(tmp_path / "run" / "checkpoints" / "4"))
    train = dataclasses.replace(RUN.train, checkpoint_dir=str(tmp_path / "run"), checkpoint_interval=2, resume="must")
    resumed = run(dataclasses.replace(RUN, train=train))
    out = capsys.readouterr().out
    assert "checkpoint 4: damaged, the content of state/" in out
    assert "starting from step 2 of this run" in out
    assert_equal_states(resumed.state, unbroken.state, rtol=0, atol=0)
    losses = [[(r["step"], r["loss"]) for r in rows(f)] for f in (tmp_path / "run", unbroken.folder)]
    assert losses[0] == losses[1]
    assert manifest.numbered(tmp_path / "run" / "checkpoints") == [2, 4, 6]


def test_a_run_without_a_whole_checkpoint_stops_and_keeps_its_rows(tmp_path):
    at(tmp_path / "run", total_steps=2)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    flip(data_file(tmp_path / "run" / "checkpoints" / "2"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no checkpoint is whole \(2\.damaged cannot be used\)"):
            at(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_never_and_must_are_kept_to(unbroken, tmp_path):
    with pytest.raises(ConfigError, match=r"--resume never: \S+ holds checkpoints \(up to step 6\); choose another"):
        at(unbroken.folder, resume="never")
    with pytest.raises(ConfigError, match=r"--resume must: \S+ holds no checkpoint; give the --checkpoint-dir"):
        at(tmp_path / "run", resume="must")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"leave out --resume-from"):
        TrainConfig(resume="never", resume_from="x")
