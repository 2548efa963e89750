"""`python -m nash_mhc.checkpoint` works without a mesh, mostly without JAX, and reports damage."""

import os
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from saves import data_file, flip

from nash_mhc.checkpoint import __main__ as command
from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import one_line_errors


class Model(NamedTuple):
    embed_VD: Any


class State(NamedTuple):
    model: Model
    step: Any


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Saved by eight devices, two of three steps evaluated."""
    folder = tmp_path_factory.mktemp("sharded")
    over = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    with Store(folder) as store:
        for step, loss in ((10, 2.5), (20, 2.75), (30, None)):
            state = State(Model(jax.device_put(np.ones((16, 4), np.float32), over)), np.int32(step))
            evaluation = None if loss is None else {"eval/loss": loss}
            values = {"step": step, "tokens_seen": 1000 * step, "evaluation": evaluation, "config": {}}
            values |= {"data": {"rows_read": 8 * step, "rows": "stories"}, "rng": {"seed": 5, "step": step}}
            store.save(step, state, values | {"metrics": {"loss": 2.34567891, "health/scales": [0.1, 0.9], "lr": None}})
    return folder


@pytest.fixture
def run(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "run")


@pytest.fixture
def call(monkeypatch, capsys):
    def called(*words):
        monkeypatch.setattr(sys, "argv", ["checkpoint", *map(str, words)])
        code = one_line_errors(command.main)
        return code, *capsys.readouterr()

    return called


def test_list_shows_every_checkpoint_including_damaged_ones(run, call):
    shutil.copytree(run / "checkpoints" / "20", run / "checkpoints" / "40.damaged")
    (run / "checkpoints" / "30" / manifest.FILE).unlink()
    code, out, err = call("list", run)
    assert (code, err) == (0, "")
    lines = [re.split(" {2,}", line) for line in out.splitlines()]
    assert [line[0] for line in lines] == ["step", "10", "20", "30", "40.damaged"]
    assert "10,000" in out
    assert "2.5000 (best)" in out
    assert "2.7500 (best)" not in out
    assert [line[-1] for line in lines[1:]] == ["complete", "complete", "no manifest", "damaged, renamed"]


def test_verify_fails_if_a_file_differs(run, call):
    code, out, _ = call("verify", run)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [[f"{n}:", "complete"] for n in (10, 20, 30)]
    flip(data_file(run / "checkpoints" / "20"))
    code, out, _ = call("verify", run / "checkpoints")
    assert code == 1
    assert "20: the content of state/" in out
    assert call("verify", run, "--step", 10)[0] == 0
    assert manifest.saved_steps(run / "checkpoints") == [10, 20, 30]  # a look changes nothing


def test_one_device_inspects_a_checkpoint_of_eight(run):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))} | {"JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-m", "nash_mhc.checkpoint", "inspect", str(run), "--step", "20"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  model.embed_VD  float32[16,4]\n" in done.stdout
    assert "2 arrays; 64 parameters in the model" in done.stdout
    assert "tokens_seen: 20000" in done.stdout
    assert "\neval/loss: 2.75\n" in done.stdout
    told = 'data/rows_read: 160\ndata/rows: "stories"\nrng/seed: 5\nrng/step: 20\nmetrics/loss: 2.34568\n'
    assert told + "metrics/health/scales: [0.1, 0.9]\nmetrics/lr: null\n" in done.stdout
    assert manifest.identity(run / "checkpoints" / "20") in done.stdout


def test_list_and_verify_need_no_jax(run):
    code = (
        "import sys; sys.modules['jax'] = sys.modules['orbax'] = None; sys.argv = ['checkpoint', {!r}, {!r}]; "
        "from nash_mhc.checkpoint.__main__ import main; sys.exit(main())"
    )
    for name in ("list", "verify"):
        done = subprocess.run([sys.executable, "-c", code.format(name, str(run))], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\n") >= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst", "x"], "unknown command 'lst'; did you mean list?"),
        (["list"], "no run directory given"),
        (["list", "nowhere"], "nowhere: no such folder"),
        (["verify", "{run}", "--step", "11"], "has no such checkpoint; its checkpoints: 10, 20, 30"),
        (["verify", "{run}", "--stp", "10"], "unknown flag --stp; did you mean --step?"),
        (["inspect", "{run}/checkpoints/10/state"], "contains no checkpoint"),
    ],
)
def test_mistakes_are_one_line(run, call, words, message):
    code, out, err = call(*(word.format(run=run) for word in words))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_inspect_refuses_a_damaged_checkpoint(run, call):
    flip(data_file(run / "checkpoints" / "30"))
    code, _, err = call("inspect", run)
    assert code == 2
    assert re.search(r"30: damaged or incomplete.*the content of state/", err)
