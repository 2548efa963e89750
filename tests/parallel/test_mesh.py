"""Devices, meshes, and the errors for settings that do not fit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from command_process import CommandProcess
from settings_small import SMALL, changed

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import (
    ConfigError,
    MeshConfig,
    RunConfig,
)
from nash_mhc.parallel.mesh import describe, make_mesh, mesh_shape
from nash_mhc.train.__main__ import main
from nash_mhc.train.inputs import resolve
from nash_mhc.train.trainer import run


def refusal(cfg: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        run(cfg, quiet=True)
    return str(error.value)


# --- make_mesh -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((1, 4, -1), (1, 4, 2)), ((8, -1, 1), (8, 1, 1))],
)
def test_minus_one_takes_the_rest(sizes: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    mesh = make_mesh(MeshConfig(*sizes))
    assert mesh.devices.shape == shape
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tp"), shape, strict=True))
    assert len(set(mesh.devices.flat)) == 8


def test_minus_one_takes_the_rest_of_num_devices() -> None:
    mesh = make_mesh(MeshConfig(data=-1, fsdp=2, num_devices=4))
    assert mesh.devices.shape == (2, 2, 1)
    assert set(mesh.devices.flat) == set(jax.devices()[:4])


def test_a_fixed_mesh_on_the_cpu_takes_as_many_devices_as_it_names() -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=3, tp=1, platform="cpu"))
    assert mesh.devices.shape == (1, 3, 1)
    assert describe(mesh) == "3 x cpu, mesh 1x3x1 (data x fsdp x tp)"


def test_two_axes_of_minus_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"only one mesh axis may be -1 .*mesh\.data and mesh\.tp"):
        MeshConfig(data=-1, tp=-1)


MISFITS = {
    "nothing left for -1": (MeshConfig(data=-1, fsdp=3), r"3 does not divide the 8 devices in use"),
    "product": (MeshConfig(data=3, fsdp=2, num_devices=8), r"needs 6 device\(s\), but 8 cpu.*--num-devices 6"),
    "more than chosen": (MeshConfig(data=4, num_devices=2), r"needs 4 device\(s\), but 2 cpu.*--num-devices 4"),
    "more chosen than there are": (MeshConfig(data=-1, num_devices=9), r"--num-devices 9: only 8 cpu.*--num-devices 8"),
    "more than there are": (MeshConfig(data=16), r"needs 16 devices, but JAX is already initialized with 8 cpu device\(s\)"),
    "wish": (MeshConfig(platform="tpu,gpu"), r"--platform tpu,gpu: no such device; available: 8 cpu\."),
    "platform": (MeshConfig(platform="tpu"), r"--platform tpu: no such device; available: 8 cpu\. Use --platform auto"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_an_impossible_mesh_is_refused(kind: str) -> None:
    cfg, message = MISFITS[kind]
    with pytest.raises(ConfigError, match=message):
        make_mesh(cfg)


# --- resolve ---------------------------------------------------------------------------------------------------------


def test_resolve_fills_in_what_depends_on_the_devices() -> None:
    cfg, mesh = resolve(changed(SMALL, mesh={"data": -1, "tp": 2}))
    assert (cfg.mesh.data, cfg.mesh.fsdp, cfg.mesh.tp) == mesh.devices.shape == (4, 1, 2)
    assert cfg.mesh.platform == "cpu"
    assert cfg.train.dtype == "float32"
    assert cfg.train.attention != "auto"
    assert cfg.train.checkpoint_dir is None  # chosen when the run begins: a printed configuration pins no folder
    assert resolve(cfg)[0] == cfg


def test_resolve_refuses_a_batch_that_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"--batch-size 8 cannot be split over data x fsdp = 3.*--batch-size 9"):
        resolve(changed(SMALL, mesh={"data": 3}))


# --- what a run refuses, before any training -------------------------------------------------------------------------

REFUSALS: dict[str, tuple[RunConfig, str]] = {
    "dataset": (changed(SMALL, data={"dataset": "nowhere"}), r"--dataset nowhere: neither 'stories' nor"),
    "variant": (changed(SMALL, data={"dataset_name": "easy"}), r"--dataset-name easy: dataset 'stories' has no subsets"),
    "split": (changed(SMALL, data={"split": "tset"}), r"split 'tset': .*train and validation"),
    "eval split": (changed(SMALL, data={"eval_split": "tset"}), r"split 'tset': .*train and validation"),
    "tokenizer": (
        changed(SMALL, data={"tokenizer": "gpt9"}),
        r"--tokenizer gpt9: neither 'bytes' nor a tokenizer.json or a folder with one",
    ),
    "vocabulary": (
        changed(SMALL, model={"vocab_size": 256}),
        r"--tokenizer bytes has 257 tokens, but the model has only 256; set --model-vocab-size 257",
    ),
    "vocabulary of another model": (
        changed(SMALL, model={"vocab_size": 256}, train={"init_from": "base"}),
        r"--tokenizer bytes has 257 tokens, but the model has only 256; use the tokenizer of --init-from base",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_run_refuses_missing_files_and_names(kind: str, tmp_path: Path) -> None:
    cfg, message = REFUSALS[kind]
    folder = tmp_path / "run"
    assert re.search(message, refusal(changed(cfg, train={"checkpoint_dir": str(folder)})))
    assert not folder.exists()


def test_a_resumed_run_keeps_its_vocabulary(tmp_path: Path) -> None:
    cfg = changed(SMALL, model={"vocab_size": 256}, train={"checkpoint_dir": str(tmp_path)})
    (tmp_path / "run.json").write_text(json.dumps({"config": cfg.to_dict(), "rows": "stories"}))
    assert f"use the tokenizer of the run in {tmp_path}" in refusal(cfg)


def test_a_file_at_the_path_of_the_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a letter")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        message = refusal(changed(SMALL, train={"checkpoint_dir": str(folder)}))
        assert re.search(r"--checkpoint-dir .*taken.*: cannot be written \(.+\); choose another folder", message)
    assert (tmp_path / "taken").read_text() == "a letter"


def test_resuming_from_a_folder_without_a_run_is_reported(tmp_path: Path) -> None:
    cfg = changed(SMALL, train={"checkpoint_dir": str(tmp_path / "new"), "resume_from": str(tmp_path / "old")})
    assert re.search(r"--resume-from .*old: not a run with checkpoints", refusal(cfg))
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    assert re.search(r"--resume-from .*old: .*no complete checkpoint", refusal(cfg))


# --- the command itself, in processes of its own ---------------------------------------------------------------------

COMMANDS = {
    "platform": ["--platform", "tpu", "--total-steps", "5"],
    "batch": ["--mesh-data", "3", "--batch-size", "8"],
    "typo": ["--bach-size", "8"],
    "print": ["--print-config", "--mesh-data", "-1", "--num-devices", "4", "--batch-size", "8", "--seed", "7"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """All commands at once, without the flags of the tests for the compiler."""
    folder = tmp_path_factory.mktemp("commands")
    started = {name: CommandProcess(["-m", "nash_mhc.train", *argv], folder, XLA_FLAGS=None) for name, argv in COMMANDS.items()}
    done = {name: process.end() for name, process in started.items()}
    assert not list(folder.iterdir())  # a refused command leaves nothing behind
    return done


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("platform", r"error: --platform tpu: no such device; available: 1 cpu\. Use --platform auto .*\n"),
        ("batch", r"error: --batch-size 8 cannot be split over data x fsdp = 3; .*\n"),
        ("typo", r"error: unknown flag --bach-size; did you mean --batch-size\?\n"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, message: str, finished: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    assert finished[name].returncode == 2
    assert re.fullmatch(message, finished[name].stderr)
    assert finished[name].stdout == ""


def test_printed_configuration_is_read_back(
    finished: dict[str, subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = finished["print"]
    assert (printed.returncode, printed.stderr) == (0, "")
    file = tmp_path / "run.yaml"
    file.write_text(printed.stdout)
    config = parse(["--config", str(file)]).config
    assert (config.mesh.data, config.mesh.num_devices, config.train.seed) == (4, 4, 7)
    assert config.train.dtype == "float32"  # resolved, not `auto`
    assert re.search(r"^ +data: 4 +# flag --mesh-data, resolved here$", printed.stdout, re.MULTILINE)
    assert re.search(r"^# compiler options on cpu .*\n#   xla_backend_optimization_level=1: \w", printed.stdout, re.MULTILINE)
    # Once more through the command: nothing is left to resolve, so the values stay what they are.
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(file), "--print-config"])
    assert one_line_errors(main) == 0
    again = capsys.readouterr().out
    values = lambda text: [line.partition("  #")[0].rstrip() for line in text.splitlines() if not line.startswith("#")]
    assert values(again) == values(printed.stdout)
    assert "#   xla_backend_optimization_level=1: left to XLA_FLAGS\n" in again  # the tests have their own


def test_the_default_mesh_takes_one_of_several_accelerators() -> None:
    """A plain command works on any host; a mesh that was asked for must still use all there is."""
    assert mesh_shape(MeshConfig(), "gpu", 8) == (1, 1, 1)
    assert mesh_shape(MeshConfig(data=-1, tp=2), "gpu", 8) == (4, 1, 2)
    assert mesh_shape(MeshConfig(tp=2, num_devices=2), "gpu", 8) == (1, 1, 2)
    with pytest.raises(ConfigError, match=r"needs 2 device\(s\), but 8 gpu .*try --mesh-data 4 --mesh-fsdp 1 --mesh-tp 2 "):
        mesh_shape(MeshConfig(tp=2), "gpu", 8)
