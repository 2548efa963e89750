"""`python -m nash_mhc.train --verify-resume`: real runs, killed, resumed and compared."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest
import small

from nash_mhc.checkpoint.store import Store
from nash_mhc.config import parsing
from nash_mhc.config.commands import one_line_errors
from nash_mhc.parallel.mesh import indivisible_sizes
from nash_mhc.train import __main__ as command
from nash_mhc.train.resume import checkpoint_values
from nash_mhc.train.verify_resume import SAVED, STEPS, different_losses, different_states, other_mesh, short_run

FLAGS = [
    "--model-width", "32", "--model-heads", "4", "--model-kv-heads", "4", "--model-head-dim", "8", "--model-ffn", "64",
    "--model-layers", "1", "--model-scales", "1", "--model-residual", "plain", "--model-conv-taps", "0",
    "--learning-rate", "3e-4", "--seq-len", "32", "--total-steps", "5000",
    "--warmup-steps", "400",
]  # fmt: skip


def call(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["train", "--verify-resume", *flags])
    return one_line_errors(command.main)


def test_a_killed_run_is_resumed_and_found_equal_here_and_on_another_mesh(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    code = call(monkeypatch, *FLAGS, "--checkpoint-dir", str(tmp_path / "mine"))
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert f"equal: the losses of steps {SAVED + 1} to {STEPS} and the last checkpoint, bit for bit\n" in out
    assert "equal: the losses of these steps on mesh 1x2x2 (data x fsdp x tp), within 0.0001 (at most " in out
    assert out.count("starting from fresh weights") == out.count(f"starting from step {SAVED} of this run") == 2
    assert "NOT EQUAL" not in out
    # Temporary files are removed, and the user's directory is not touched.
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_a_mistake_is_told_once_by_the_run_itself(tmp_path, monkeypatch, capfd):
    assert call(monkeypatch, "--batch-sise", "8") == 2
    assert "did you mean --batch-size?" in capfd.readouterr().err
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert call(monkeypatch, *FLAGS, "--dataset", str(tmp_path / "nowhere.txt")) == 2
    err = capfd.readouterr().err
    assert err.count("error: ") == 1 and "nowhere.txt" in err
    assert "the uninterrupted run ended with exit code 2" in err
    assert not list(tmp_path.iterdir())


def test_when_the_command_dies_its_runs_end_and_leave_nothing(tmp_path):
    folder = tmp_path / "verify-resume-x"
    folder.mkdir()
    (folder / "unbroken.json").write_text(json.dumps(short_run(parsing.parse(FLAGS).config, folder / "unbroken").to_dict()))
    argv = [sys.executable, "-m", "nash_mhc.train.verify_resume", str(folder / "unbroken.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        while not (folder / "unbroken").exists() and child.poll() is None:
            time.sleep(0.02)
        child.stdin.close()  # as when the parent process dies
        assert (child.wait(), child.stderr.read()) == (1, b"")  # at once, without errors about missing files
    while folder.exists():  # another process removes it
        time.sleep(0.02)


def logged(folder, losses, tokens=100):
    folder.mkdir()
    lines = [json.dumps({"step": s, "loss": loss, "tokens_seen": tokens * s}) for s, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_every_loss_that_differs_is_named(tmp_path):
    losses = {step: 5.0 - step / 10 for step in range(1, STEPS + 1)}
    unbroken = logged(tmp_path / "a", losses)
    assert not list(different_losses(unbroken, logged(tmp_path / "same", losses), 0.0))
    nearly = logged(tmp_path / "nearly", losses | {6: losses[6] * (1 + 3e-5), 1: 9.0})  # step 1 is before the checkpoint
    assert [what for _, what in different_losses(unbroken, nearly, 0.0)] == [
        f"step 6 has loss {losses[6]!r} in the uninterrupted run and {losses[6] * (1 + 3e-5)!r} in the resumed one"
    ]
    assert not list(different_losses(unbroken, nearly, 1e-4))
    assert max(apart for apart, _ in different_losses(unbroken, nearly, -1.0)) == pytest.approx(3e-5)
    without = logged(tmp_path / "without", {s: loss for s, loss in losses.items() if s != 8} | {7: None})
    assert [apart for apart, _ in different_losses(unbroken, without, 1e-4)] == [math.inf] * 3  # 8 has no tokens
    other_rows = list(different_losses(unbroken, logged(tmp_path / "rows", losses, tokens=101), 1e-4))
    assert len(other_rows) == STEPS - SAVED
    assert re.search("step 4 .* 400 tokens .* 404 ", other_rows[0][1])


def test_every_array_and_value_that_differs_is_named(tmp_path):
    cfg = small.config()
    state = jax.tree.map(np.array, jax.device_get(small.start(cfg, small.make_mesh(cfg.mesh))))

    def saved(name, state, **values):
        told = checkpoint_values(cfg.to_dict(), STEPS, rows="stories-2", counts={}, metrics={}, evaluation=None) | values
        told["config"]["train"]["checkpoint_dir"] = name  # differs between runs
        with Store(tmp_path / name) as store:
            store.save(STEPS, state, told)
        return tmp_path / name

    unbroken = saved("unbroken", state)
    assert different_states(unbroken, saved("same", state)) == []
    state.opt_state[1].mu.layers.ffn.up_DF[0, 0, 0] = np.nextafter(np.float32(0), np.float32(1))
    parts = different_states(unbroken, saved("other", state, data={"rows_read": 1, "rows": "stories-2"}))
    assert parts == ["opt_state[1].mu.layers.ffn.up_DF", "data"]


def fitting_mesh(cfg, platform, there):
    return other_mesh(cfg.mesh, lambda shape: not indivisible_sizes(cfg.data, cfg.model, shape), platform, there)


@pytest.mark.parametrize(
    ("now", "platform", "there", "expected"),
    [
        ((1, 1, 1), "cpu", 1, (1, 2, 2)),
        ((1, 2, 2), "cpu", 4, (2, 1, 2)),
        ((8, 1, 1), "gpu", 8, (2, 2, 2)),
        ((1, 1, 1), "gpu", 8, (2, 2, 2)),  # the other devices are idle
        ((1, 1, 1), "gpu", 1, None),
    ],
)
def test_the_other_mesh_is_one_that_the_run_fits_on(now, platform, there, expected):
    mesh = fitting_mesh(small.mesh_config(small.config(), *now), platform, there)
    assert (mesh and (mesh.data, mesh.fsdp, mesh.tp)) == expected
    assert mesh is None or mesh.num_devices == math.prod(expected)


def test_a_mesh_that_does_not_divide_is_not_chosen():
    cfg = small.config(data__batch_size=2, model__kv_heads=1, model__heads=2)
    mesh = fitting_mesh(cfg, "cpu", 1)
    assert (mesh.data, mesh.fsdp, mesh.tp) == (1, 2, 1)


def test_the_users_settings_are_kept_but_for_length_and_place(tmp_path):
    cfg = small.config(train__resume_from="somewhere", optim__learning_rate=0.5, optim__warmup_steps=9, train__seed=3)
    short = short_run(cfg, tmp_path)
    assert (short.model, short.data, short.mesh) == (cfg.model, cfg.data, cfg.mesh)
    assert dataclasses.replace(short.optim, warmup_steps=9) == cfg.optim
    assert (short.train.seed, short.train.resume_from, short.train.checkpoint_dir) == (3, None, str(tmp_path))
