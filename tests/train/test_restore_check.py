"""`python -m nash_mhc.checkpoint restore-test` restores a checkpoint and reports every defect."""

import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from command_process import CommandProcess
from saves import data_file, flip

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.store import Store
from nash_mhc.train import verify_resume
from nash_mhc.train.resume import checkpoint_values

CFG = small.mesh_config(small.config(optim__ema_decay=0.9), 2, 2, 2)


@pytest.fixture(scope="module")
def state():
    return small.start(CFG, small.make_mesh(CFG.mesh))


def saved(folder, state, *, step=4, cfg=CFG):
    with Store(folder) as store:
        store.save(
            step, state, checkpoint_values(cfg.to_dict(), step, rows="stories-2", counts={}, metrics={}, evaluation=None)
        )
    return folder / "checkpoints" / str(step)


def tried(folder, monkeypatch, capsys, step=4):
    monkeypatch.setattr(sys, "argv", ["verify_resume", "restore-test", str(folder), str(step)])
    return verify_resume.main(), capsys.readouterr().out


def test_a_laptop_with_one_device_restores_what_eight_wrote(state, tmp_path):
    saved(tmp_path, state)
    done = CommandProcess(["-m", "nash_mhc.checkpoint", "restore-test", str(tmp_path)], tmp_path).end()
    assert (done.returncode, done.stderr) == (0, "")
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in map(np.asarray, jax.tree.leaves(state.model))))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    assert f"the model has {count:,} parameters with norm {norm:.6g}; 0 updates" in done.stdout
    assert "on one cpu device" in done.stdout
    assert done.stdout.endswith("every array has the shape and dtype of its configuration, and every number is finite\n")


def test_a_number_that_is_none_is_found(state, tmp_path, monkeypatch, capsys):
    place = lambda s: (s.opt_state[1].mu.layers.ffn.up_DF, s.ema.norm.scale_D)
    broken = eqx.tree_at(place, state, tuple(leaf.at[(0,) * leaf.ndim].set(jnp.nan) for leaf in place(state)))
    saved(tmp_path, broken)
    code, out = tried(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "FAILED: opt_state[1].mu.layers.ffn.up_DF has 1 non-finite values of 4,096\n" in out
    assert "FAILED: ema.norm.scale_D has 1 non-finite values of 32\n" in out
    assert "every number is finite" not in out


def test_another_dtype_is_not_cast_in_silence(state, tmp_path, monkeypatch, capsys):
    saved(tmp_path, eqx.tree_at(lambda s: s.model.norm.scale_D, state, replace_fn=lambda a: a.astype(jnp.bfloat16)))
    code, out = tried(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "FAILED: model.norm.scale_D is saved as bfloat16[32], expected float32[32]\n" in out


def test_damage_and_what_its_own_configuration_does_not_fit_fail(state, tmp_path, monkeypatch, capsys):
    saved(tmp_path / "a", state, cfg=small.config(optim__ema_decay=0.9, model__ffn=32))
    code, out = tried(tmp_path / "a", monkeypatch, capsys)
    assert code == 1
    assert "ffn.gate_DF is (2, 32, 64), but this configuration needs (2, 32, 32)" in out

    checkpoint = saved(tmp_path / "b", state)
    flip(data_file(checkpoint))
    code, out = tried(tmp_path / "b", monkeypatch, capsys)
    assert code == 1
    assert "FAILED: " in out and "the content of state/" in out and "has changed" in out
    assert manifest.saved_steps(tmp_path / "b" / "checkpoints") == [4]  # the test changes nothing

    checkpoint = saved(tmp_path / "c", state)
    values = manifest.read_values(checkpoint)
    values["config"]["model"]["unheard_of"] = 1
    (checkpoint / "values" / "metadata").write_text(json.dumps(values))
    manifest.write(checkpoint)
    code, out = tried(tmp_path / "c", monkeypatch, capsys)
    assert code == 1
    assert "this version cannot read its configuration (unknown key model.unheard_of; choose from " in out
