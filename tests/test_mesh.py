"""Devices, meshes and what fits on them; and what a user is told when something does not."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import (
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RecursiveConfig,
    ReservoirConfig,
    RunConfig,
    TrainConfig,
)
from nash_mhc.parallel.divisibility import check_fit, misfits
from nash_mhc.parallel.mesh import describe, make_mesh, mesh_shape
from nash_mhc.train.__main__ import main
from nash_mhc.train.resolve_devices import resolve
from nash_mhc.train.run import run

SMALL = RunConfig(
    model=ModelConfig(vocab_size=257, width=16, layers=1, heads=4, kv_heads=4, head_dim=4, ffn=16, scales=4, ratio=2),
    data=DataConfig(batch_size=8, seq_len=64),
    optim=OptimConfig(warmup_steps=0),
    train=TrainConfig(total_steps=1, eval_batches=1),
)


def changed(cfg: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    return dataclasses.replace(cfg, **{k: dataclasses.replace(getattr(cfg, k), **v) for k, v in sections.items()})


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


def test_two_rests_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"only one mesh axis may be -1 .*mesh\.data and mesh\.tp"):
        MeshConfig(data=-1, tp=-1)


MISFITS = {
    "nothing left for -1": (MeshConfig(data=-1, fsdp=3), r"3 does not divide the 8 devices in use"),
    "product": (MeshConfig(data=3, fsdp=2, num_devices=8), r"needs 6 device\(s\), but 8 cpu.*--num-devices 6"),
    "more than chosen": (MeshConfig(data=4, num_devices=2), r"needs 4 device\(s\), but 2 cpu.*--num-devices 4"),
    "more chosen than there are": (MeshConfig(data=-1, num_devices=9), r"--num-devices 9: only 8 cpu.*--num-devices 8"),
    "more than there are": (MeshConfig(data=16), r"needs 16 devices, but JAX already runs with 8 cpu device\(s\)"),
    "wish": (MeshConfig(platform="tpu,gpu"), r"--platform tpu,gpu: no such device here; there is 8 cpu\."),
    "platform": (MeshConfig(platform="tpu"), r"--platform tpu: no such device here; there is 8 cpu\. Use --platform auto"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_mesh_that_the_devices_cannot_form_is_refused(kind: str) -> None:
    cfg, message = MISFITS[kind]
    with pytest.raises(ConfigError, match=message):
        make_mesh(cfg)


# --- check_fit -------------------------------------------------------------------------------------------------------

FITS: dict[str, tuple[RunConfig, dict[str, int]]] = {
    "--batch-size": (changed(SMALL, data={"batch_size": 10}), {"data": 2, "fsdp": 2, "tp": 1}),
    "--seq-len": (changed(SMALL, data={"seq_len": 62}, model={"scales": 1}), {"data": 1, "fsdp": 1, "tp": 4}),
    "--model-width": (changed(SMALL, model={"width": 18}), {"data": 1, "fsdp": 4, "tp": 1}),
    "--model-heads": (changed(SMALL, model={"heads": 6, "kv_heads": 6}), {"data": 1, "fsdp": 1, "tp": 4}),
    "--model-kv-heads": (changed(SMALL, model={"heads": 12, "kv_heads": 6}), {"data": 1, "fsdp": 1, "tp": 4}),
    "--model-ffn": (changed(SMALL, model={"ffn": 30}), {"data": 1, "fsdp": 1, "tp": 4}),
    "--model-vocab-size": (
        changed(SMALL, data={"seq_len": 72}, model={"vocab_size": 120, "heads": 6, "kv_heads": 3, "ffn": 15}),
        {"data": 1, "fsdp": 1, "tp": 3},
    ),
}


def as_argv(cfg: RunConfig) -> list[str]:
    values = cfg.to_dict()
    return [f"{section}.{key}={value}" for section in ("model", "data", "optim", "train")
            for key, value in values[section].items()]  # fmt: skip


# Three devices want a multiple of 3, four scales one of 8: advice must be both.
ALIGNED = changed(SMALL, data={"seq_len": 64}, model={"heads": 6, "kv_heads": 3, "ffn": 15}), {"data": 1, "fsdp": 1, "tp": 3}


def remedies(error: ConfigError) -> list[list[str]]:
    """The sets of flags that a refusal proposes."""
    _, found, proposed = str(error).partition("; try ")
    assert found, error
    return [flags.split() for flags in proposed.split(", or ")]


def refused(cfg: RunConfig, shape: dict[str, int]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check_fit(cfg, shape)
    return error.value


@pytest.mark.parametrize(
    ("flag", "cfg", "shape"),
    [
        *((flag, *case) for flag, case in FITS.items()),
        pytest.param("--seq-len", *ALIGNED),
    ],
)
def test_what_does_not_divide_is_refused_and_the_advice_holds(flag: str, cfg: RunConfig, shape: dict[str, int]) -> None:
    error = refused(cfg, shape)
    assert re.search(rf"{flag} \d+ cannot be split over [a-z x]+ = \d+", str(error))
    mesh, sizes = remedies(error)
    assert mesh[0] == "--mesh-data"
    assert sizes[0] == flag
    # Behind the others on a command line, the flags give a valid configuration that fits.
    check_fit(parse([*as_argv(cfg), *sizes]).config, shape)
    check_fit(cfg, parse(mesh).config.mesh.axes)


def test_every_size_that_does_not_divide_is_told_at_once() -> None:
    cfg = changed(SMALL, data={"batch_size": 10, "seq_len": 56}, model={"width": 18, "heads": 6, "kv_heads": 6, "ffn": 30})
    error = refused(cfg, {"data": 1, "fsdp": 4, "tp": 16})
    for flag in ("--batch-size 10", "--seq-len 56", "--model-width 18", "--model-heads 6", "--model-kv-heads 6", "--model-ffn 30"):
        assert f"{flag} cannot be split over " in str(error)


def test_weights_that_are_given_keep_their_sizes(tmp_path: Path) -> None:
    """Where a run starts from weights, or its rows are prepared, only another mesh is proposed."""
    cfg, shape = FITS["--model-width"]
    assert len(remedies(refused(changed(cfg, train={"init_from": "runs/base"}), shape))) == 1
    cfg, shape = FITS["--seq-len"]
    assert len(remedies(refused(changed(cfg, data={"dataset": str(tmp_path)}), shape))) == 1
    with pytest.raises(ConfigError) as error:
        check_fit(FITS["--model-width"][0], FITS["--model-width"][1], model_is_given=True)
    assert len(remedies(error.value)) == 1


KINDS = {
    "nash-mhc": lambda draw: ModelConfig(
        vocab_size=257, width=draw(4, 40), layers=1, heads=(heads := draw(1, 12)), kv_heads=heads, head_dim=4, ffn=draw(4, 40),
        scales=draw(1, 3), ratio=2,
    ),
    "reservoir": lambda draw: ReservoirConfig(
        vocab_size=257, width=draw(4, 40), units=(ring := draw(2, 4)) * draw(2, 20), ring=ring, ffn=draw(4, 40), unit="tanh", layers=1
    ),
    "recursive": lambda draw: RecursiveConfig(
        vocab_size=257, width=4 * (heads := draw(1, 12)), heads=heads, head_dim=4, ffn=draw(4, 40)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_proposed_for_a_random_bad_mesh_works(kind: str) -> None:
    """As on a machine with a number of accelerators: the flags behind the user's own give a mesh that they form and
    over which everything divides."""
    rng = np.random.default_rng(sum(kind.encode()))
    draw = lambda low, high: int(rng.integers(low, high + 1))
    refusals = 0
    while refusals < 60:
        model = KINDS[kind](draw)
        there = draw(1, 16)
        axes = {axis: draw(1, 4) for axis in ("data", "fsdp", "tp")}
        if draw(0, 2) == 0:
            axes[("data", "fsdp", "tp")[draw(0, 2)]] = -1
        cfg = dataclasses.replace(
            changed(SMALL, data={"batch_size": draw(1, 24), "seq_len": 16}),
            model=model,
            mesh=MeshConfig(**axes, num_devices=draw(1, there) if draw(0, 1) else None),
        )
        try:
            fitted(cfg, there)
        except ConfigError as error:
            refusals += 1
            for flags in remedies(error):
                fitted(parse([f"model_kind={kind}", *as_argv(cfg), *mesh_argv(cfg), *flags]).config, there)
        else:
            continue
    assert refusals == 60


def mesh_argv(cfg: RunConfig) -> list[str]:
    return [f"mesh.{name}={value}" for name, value in {**cfg.mesh.axes, "num_devices": cfg.mesh.num_devices}.items()]


def fitted(cfg: RunConfig, there: int) -> None:
    shape = mesh_shape(cfg.mesh, "gpu", there, lambda shape: not misfits(cfg, shape))
    check_fit(cfg, dict(zip(cfg.mesh.axes, shape, strict=True)))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 1, 4), (2, 2, 2)])
def test_what_divides_is_accepted(shape: tuple[int, int, int]) -> None:
    check_fit(SMALL, dict(zip(("data", "fsdp", "tp"), shape, strict=True)))


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
    "dataset": (changed(SMALL, data={"dataset": "nowhere"}), r"--dataset nowhere: neither 'stories' nor a file or folder"),
    "variant": (changed(SMALL, data={"dataset_name": "easy"}), r"--dataset-name easy: dataset 'stories' has no variants"),
    "split": (changed(SMALL, data={"split": "tset"}), r"split 'tset': there are train and validation"),
    "eval split": (changed(SMALL, data={"eval_split": "tset"}), r"split 'tset': there are train and validation"),
    "tokenizer": (
        changed(SMALL, data={"tokenizer": "gpt9"}),
        r"--tokenizer gpt9: neither 'bytes' nor a tokenizer.json or a folder with one",
    ),
    "vocabulary": (
        changed(SMALL, model={"vocab_size": 256}),
        r"--tokenizer bytes has 257 tokens, the model only 256; set --model-vocab-size 257",
    ),
    "vocabulary of another model": (
        changed(SMALL, model={"vocab_size": 256}, train={"init_from": "base"}),
        r"--tokenizer bytes has 257 tokens, the model only 256; use the tokenizer of --init-from base",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_run_refuses_what_is_not_there(kind: str, tmp_path: Path) -> None:
    cfg, message = REFUSALS[kind]
    folder = tmp_path / "run"
    assert re.search(message, refusal(changed(cfg, train={"checkpoint_dir": str(folder)})))
    assert not folder.exists()


def test_a_file_in_the_way_of_the_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a letter")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        message = refusal(changed(SMALL, train={"checkpoint_dir": str(folder)}))
        assert re.search(r"--checkpoint-dir .*taken.*: cannot be written \(.+\); choose another folder", message)
    assert (tmp_path / "taken").read_text() == "a letter"


def test_resuming_from_where_no_run_is_is_told(tmp_path: Path) -> None:
    cfg = changed(SMALL, train={"checkpoint_dir": str(tmp_path / "new"), "resume_from": str(tmp_path / "old")})
    assert re.search(r"--resume-from .*old: no run with checkpoints there", refusal(cfg))
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    assert re.search(r"--resume-from .*old: its checkpoints folder holds no finished", refusal(cfg))


# --- the command itself, in processes of its own ---------------------------------------------------------------------

COMMANDS = {
    "platform": ["--platform", "tpu", "--total-steps", "5"],
    "batch": ["--mesh-data", "3", "--batch-size", "8"],
    "typo": ["--bach-size", "8"],
    "print": ["--print-config", "--mesh-data", "-1", "--num-devices", "4", "--batch-size", "8", "--seed", "7"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """All commands at once: most of their time is starting up."""
    folder = tmp_path_factory.mktemp("commands")
    root = str(Path(__file__).parent.parent)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": root}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "nash_mhc.train", *argv], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, argv in COMMANDS.items()
    }  # fmt: skip
    done = {}
    for name, process in started.items():
        out, err = process.communicate()
        done[name] = subprocess.CompletedProcess(COMMANDS[name], process.returncode, out, err)
    assert not list(folder.iterdir())  # a refused command leaves nothing behind
    return done


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("platform", r"error: --platform tpu: no such device here; there is 1 cpu\. Use --platform auto to take the best\n"),
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
