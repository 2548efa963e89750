"""Resuming: exactly, from the latest complete checkpoint; --resume auto, never and must."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import small
from runs import RUN, assert_equal_states, at, rows
from saves import data_file, flip

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import ConfigError, parsing
from nash_mhc.config.schema import TrainConfig
from nash_mhc.train import run
from nash_mhc.train.inferred_settings import infer_settings, recorded_settings
from nash_mhc.train.resume import check_resume, starting_state
from nash_mhc.train.state import sharded_abstract_state


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return at(tmp_path_factory.mktemp("resume") / "run", checkpoint_interval=2)


def test_a_checkpoint_holds_its_own_evaluation(unbroken):
    told = {step: manifest.read_values(unbroken.folder / "checkpoints" / str(step))["evaluation"] for step in (2, 4, 6)}
    assert told == {2: None, 4: None, 6: unbroken.evaluation}


def test_a_checkpoint_holds_position_randomness_and_metrics(unbroken, tmp_path):
    logged = {row["step"]: row for row in rows(at(tmp_path / "run", log_interval=1).folder)}
    for step in (2, 4, 6):
        values = manifest.read_values(unbroken.folder / "checkpoints" / str(step))
        assert values["data"] == {"rows_read": 8 * step, "rows": "stories-2"}
        assert values["rng"] == {"seed": RUN.train.seed, "step": step}
        # The metrics of the step itself, bit for bit, without those of several steps.
        told = values["metrics"]
        once = {"tokens", "skipped", "spike", "empty"}  # per step here, over the run in a row
        assert {"loss", "grad_norm", "lr", *once} <= set(told)
        assert all(told[k] == logged[step][k] for k in set(told) - once)


# Settings that determine the data of a step or the trained function, with values that RUN does not have.
KEPT = {
    **{f"model__{k}": v for k, v in {"width": 48, "ffn": 32, "layers": 3, "rope_theta": 5e4, "norm_eps": 1e-5}.items()},
    "data__dataset": "other.txt", "data__dataset_name": "v2", "data__split": "validation", "data__tokenizer": "other",
    "data__seq_len": 64, "data__text_field": "body", "data__format": "chat", "data__template": "{content}",
    "data__loss_on": "all", "data__max_documents": 9, "data__validation_fraction": 0.1, "data__streaming": True,
    "data__test_fraction": 0.1, "data__test_split": "final",
    "data__batch_size": 16, "train__grad_accum": 2, "train__seed": 1, "optim__ema_decay": 0.9,
    "optim__optimizer": "muon", "model__value_embeddings": 2, "optim__freeze": "embed_VD", "optim__train_only": "layers",
}  # fmt: skip
NAMED = {"data__batch_size": "batch-size x grad-accum", "train__grad_accum": "batch-size x grad-accum"}
FREE = {
    "optim__learning_rate": 1e-4, "optim__schedule": "cosine", "optim__weight_decay": 0.0, "optim__max_grad_norm": 0.0,
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
    """The same run, described by run.json or by its checkpoints, with and without an unreadable latest one."""
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
        with pytest.raises(
            ConfigError, match=rf"holds another run: .*{re.escape(key)} \(.* in that run, .* in this command\)"
        ) as refused:
            check_resume(changed(folder, **{name: value}), rows="stories-2")
        assert str(refused.value).count(" in that run, ") == 1
    with pytest.raises(ConfigError, match=r"the data of --dataset stories has changed since this run began"):
        check_resume(changed(folder), rows="another")
    for name, value in FREE.items():
        check_resume(changed(folder, **{name: value}), rows="stories-2")
    check_resume(changed(folder, data__batch_size=4, train__grad_accum=2), rows="stories-2")
    # Another run's weights fit other data and another batch, but not another model.
    new = changed(folder.parent / "new", train__resume_from=str(folder), train__seed=5, data__seq_len=64, data__batch_size=2)
    check_resume(new, rows="another")
    with pytest.raises(ConfigError, match=r"model\.ffn \(64 in that run, 32 in this command\)"):
        check_resume(dataclasses.replace(new, model=dataclasses.replace(new.model, ffn=32)), rows="another")


def test_a_run_goes_on_with_everything_changed_that_may(unbroken, tmp_path):
    folder = shutil.copytree(unbroken.folder, tmp_path / "run")
    (folder / "run.json").unlink()
    result = run(changed(folder, **FREE | {"data__batch_size": 4, "train__grad_accum": 2, "data__num_workers": 0}), quiet=True)
    assert int(result.state.step) == 7
    assert result.state.model.embed_VD.sharding.mesh.shape["data"] == 2
    values = manifest.read_values(folder / "checkpoints" / "7")
    assert values["data"]["rows_read"] == 7 * 8
    assert rows(folder)[-1]["loss"] < rows(unbroken.folder)[0]["loss"]


def test_keys_that_an_older_run_does_not_record_mean_what_it_did(unbroken, tmp_path):
    folder = shutil.copytree(unbroken.folder, tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    for name in ("config", "settings"):
        record[name]["model"] = {
            key: value for key, value in record[name]["model"].items() if key not in ("value_embeddings", "ffn_kind")
        }
        record[name]["optim"].pop("rate_factors", None)
    (folder / "run.json").write_text(json.dumps(record))
    check_resume(changed(folder), rows="stories-2")


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
    assert manifest.saved_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]


def test_a_run_without_a_whole_checkpoint_stops_and_keeps_its_rows(tmp_path):
    at(tmp_path / "run", total_steps=2)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    flip(data_file(tmp_path / "run" / "checkpoints" / "2"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"all checkpoints are damaged \(2\.damaged\)"):
            at(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_never_and_must_are_kept_to(unbroken, tmp_path):
    with pytest.raises(ConfigError, match=r"--resume never: \S+ holds checkpoints .*step 6; .*--checkpoint-dir"):
        at(unbroken.folder, resume="never")
    with pytest.raises(ConfigError, match=r"--resume must: \S+ contains no checkpoint; give the --checkpoint-dir"):
        at(tmp_path / "run", resume="must")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"cannot be combined with --resume-from"):
        TrainConfig(resume="never", resume_from="x")


def test_rows_whose_checkpoints_are_missing_are_not_erased(tmp_path):
    folder = tmp_path / "run"
    at(folder, checkpoint_interval=2, log_interval=1)  # the second save waits for the first, which later rows record
    (folder / "checkpoints").rename(tmp_path / "kept")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    missing = r"metrics\.jsonl has rows up to step 6, .*checkpoints are missing.* step [24]\);.* --checkpoint-dir"
    for make_folder in (False, True):  # missing, then empty, as a run that has not saved yet leaves it
        if make_folder:
            (folder / "checkpoints").mkdir()
        for options in ({}, {"init_from": str(folder.parent / "base")}, {"resume": "never"}):
            with pytest.raises(ConfigError, match=missing):
                at(folder, **options)
    (folder / "checkpoints").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "kept").rename(folder / "checkpoints")
    assert int(at(folder, total_steps=7).state.step) == 7
    # A run that was killed before its first checkpoint has rows, too, and starts again.
    at(tmp_path / "killed", total_steps=4)
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl has rows up to step 4, .*checkpoints are missing"):
        at(tmp_path / "killed")
    (tmp_path / "killed" / "checkpoints").mkdir()
    assert int(at(tmp_path / "killed").state.step) == 6
    assert [row["step"] for row in rows(tmp_path / "killed")] == [2, 4, 6]


# --- starting from another run's weights -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return at(tmp_path_factory.mktemp("base") / "run", checkpoint_interval=2, eval_interval=0)


def test_init_from_takes_the_weights_and_nothing_else(base, tmp_path, capsys, monkeypatch):
    copy = shutil.copytree(base.folder, tmp_path / "base")
    new = lambda **changes: changed(
        tmp_path / "new", **{"train__init_from": str(copy), "train__seed": 5, "data__max_documents": 50} | changes
    )
    cfg = new(train__total_steps=2)
    result = run(dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, warmup_steps=2, schedule="cosine")))
    out = capsys.readouterr().out
    fresh = "optimizer, schedule, data and step count are fresh"
    assert f"starting from the weights of step 6 of {copy}; {fresh}" in out
    first = rows(tmp_path / "new")[0]
    assert first["step"] == 2
    assert first["tokens_seen"] <= 2 * 8 * 32
    assert first["loss"] < 0.9 * rows(base.folder)[0]["loss"]  # it has learned before
    assert int(result.state.step) == 2
    told = json.loads((tmp_path / "new" / "run.json").read_text())["init_from"]
    assert told == {
        "folder": str(copy), "step": 6, "averaged": False,
        "manifest": manifest.identity(base.folder / "checkpoints" / "6"),
    }  # fmt: skip
    # The same command resumes from the run's own checkpoint, even if the base is gone.
    shutil.rmtree(copy)
    again = ["--init-from", str(copy), "--checkpoint-dir", str(tmp_path / "new")]
    assert (
        parsing.parse(again, found=infer_settings, recorded=recorded_settings, folder="train.checkpoint_dir").config.model
        == cfg.model
    )
    monkeypatch.chdir(tmp_path)
    run(new(train__total_steps=4, train__init_from="base"))
    assert "starting from step 2 of this run" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "run.json").read_text())["init_from"] == told
    # Another base is refused, because its weights would not be used.
    with pytest.raises(ConfigError, match=rf"--init-from {base.folder}: \S+new .* from {copy};"):
        run(new(train__init_from=str(base.folder)), quiet=True)
    with pytest.raises(ConfigError, match=r"fresh weights; .*--checkpoint-dir"):
        at(base.folder, init_from=str(base.folder))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_the_weights_are_the_saved_ones_bit_for_bit_and_the_rest_is_new(base, tmp_path, mesh):
    cfg = changed(tmp_path / "new", train__init_from=str(base.folder), train__init_step=4, optim__ema_decay=0.5)
    cfg = small.mesh_config(cfg, *mesh)
    mesh = small.make_mesh(cfg.mesh)
    with Store(tmp_path / "new") as store, Store(base.folder) as other:
        start = starting_state(cfg, mesh, store)
        saved, _ = other.restore(4, sharded_abstract_state(RunFolder(base.folder).config(), mesh))
    fresh = small.start(cfg, mesh)
    assert (start.step, int(start.state.step)) == (0, 0)
    assert_equal_states(start.state.model, saved.model, rtol=0, atol=0)
    assert_equal_states(start.state.ema, saved.model, rtol=0, atol=0)
    assert_equal_states(start.state.opt_state, fresh.opt_state, rtol=0, atol=0)
    for a, b in zip(jax.tree.leaves(start.state), jax.tree.leaves(fresh), strict=True):
        assert a.sharding == b.sharding


def test_averaged_weights_are_what_another_run_starts_from(tmp_path):
    """Start from a saved state with averages, here without training it."""
    averaging, new = (
        changed(tmp_path / "base", optim__ema_decay=0.5),
        changed(tmp_path / "new", train__init_from=str(tmp_path / "base")),
    )
    mesh = small.make_mesh(new.mesh)
    state = small.start(averaging, mesh)
    state = dataclasses.replace(state, ema=jax.tree.map(lambda a: np.asarray(a) + 0.5, state.ema))
    with Store(tmp_path / "base") as store:
        store.save(3, state, {})
    RunFolder(tmp_path / "base").write(
        {"run.json": json.dumps({"config": averaging.to_dict(), "rows": "none", "parameters": 0})}
    )
    with Store(tmp_path / "new") as store:
        start = starting_state(new, mesh, store)
    assert start.origin.startswith("the averaged weights of step 3 of ")
    assert_equal_states(start.state.model, state.ema, rtol=0, atol=0)


def test_what_cannot_be_started_from_is_one_line(base, tmp_path):
    new = lambda **changes: changed(tmp_path / "new", train__init_from=str(base.folder), **changes)
    with pytest.raises(ConfigError, match=r"--init-from \S+nothing: not a run with checkpoints"):
        run(changed(tmp_path / "new", train__init_from=str(tmp_path / "nothing")), quiet=True)
    with pytest.raises(ConfigError, match=r"--init-step 3: no such checkpoint; checkpoints of that run: 2, 4, 6"):
        run(new(train__init_step=3), quiet=True)
    damaged = shutil.copytree(base.folder, tmp_path / "damaged")
    for path in (damaged / "checkpoints" / "4" / "state").glob("_METADATA"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"--init-from \S+damaged: checkpoint 4 is damaged .*; choose another"):
        run(changed(tmp_path / "new", train__init_from=str(damaged), train__init_step=4), quiet=True)
    # Checked directly: a run would already have started to compile the step.
    mesh = small.make_mesh(RUN.mesh)
    with Store(tmp_path / "new") as store:
        with pytest.raises(ConfigError, match=r"model\.layers\.ffn\.gate_DF is \(2, 32, 64\), but this .* needs \(2, 32, 32\)"):
            starting_state(new(model__ffn=32), mesh, store)
        with pytest.raises(ConfigError, match=r"contains model\.layers\.attention\.k_norm\.scale_D"):
            starting_state(new(model__qk_norm=False), mesh, store)
    with pytest.raises(ConfigError, match=r"--resume-from .*--init-from"):
        new(train__resume_from=str(base.folder))
    with pytest.raises(ConfigError, match=r"--init-step .*--init-from"):
        changed(tmp_path / "new", train__init_step=3)
    with pytest.raises(
        ConfigError, match=r"--resume-from \S+ has already reached step 6, and --total-steps is 6; .* --init-from"
    ):
        run(changed(tmp_path / "new", train__resume_from=str(base.folder)), quiet=True)
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file() and path.parent.name != "checkpoints"]


# --- settings that changed -------------------------------------------------------------------------------------------


def test_settings_that_changed_are_told_in_a_line_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)  # no evaluation to compile
    at(tmp_path / "run", total_steps=2)
    run(changed(tmp_path / "run", train__total_steps=2))
    assert "settings changed" not in capsys.readouterr().out
    run(changed(tmp_path / "run", train__total_steps=4, optim__learning_rate=1e-4, optim__schedule="cosine", mesh__data=2))
    out = capsys.readouterr().out
    told = "settings changed: optim.learning_rate 0.00015 -> 0.0001, optim.schedule constant -> cosine, "
    assert told + "train.total_steps 2 -> 4, mesh.data 1 -> 2\n" in out
    # 3/4 of a cosine from 1e-4 to 5% of it; before, the rate was constant.
    assert re.search("learning rate .* 1.89e-05 .* 1.50e-04 .*cosine .* step 4 with 5.00e-06\n", out)
    assert rows(tmp_path / "run")[-1]["lr"] == pytest.approx(5e-6)
    at(tmp_path / "run", total_steps=5, log_interval=1)
    history = json.loads((tmp_path / "run" / "run.json").read_text())["history"]
    assert [(entry["step"], entry["changed"].get("train.total_steps")) for entry in history] == [(2, [2, 4]), (4, [4, 5])]
    assert history[0]["changed"]["mesh.data"] == [1, 2]
    assert history[1]["changed"]["train.log_interval"] == [2, 1]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", entry["at"]) for entry in history)
    # Without run.json, the checkpoint has the settings.
    (tmp_path / "run" / "run.json").unlink()
    run(changed(tmp_path / "run", train__total_steps=6, train__log_interval=1, optim__weight_decay=0.5))
    assert "settings changed: optim.weight_decay 0.1 -> 0.5, train.total_steps 5 -> 6\n" in capsys.readouterr().out
