"""A missing model folder: every command suggests the download and creates nothing."""

import sys

import pytest

from nash_mhc.bench import __main__ as bench
from nash_mhc.config import parsing
from nash_mhc.config.schema import ConfigError
from nash_mhc.data.tokenizer import load_tokenizer
from nash_mhc.evaluate import __main__ as evaluate
from nash_mhc.generate import __main__ as generate
from nash_mhc.kits.distill import command as distill
from nash_mhc.kits.hub import command as hub
from nash_mhc.plan import __main__ as plan
from nash_mhc.train.inferred_settings import infer_settings

MODEL = "Qwen/Qwen3-0.6B"
COMMANDS = {
    "generate": (generate.main, [MODEL]),
    "evaluate": (evaluate.main, [MODEL, "--tasks", "stories"]),
    "hub import": (hub.main, ["import", MODEL, "--out", "out"]),
    "hub import --base": (hub.main, ["import", "adapters", "--base", MODEL, "--out", "out"]),
    "hub export": (hub.main, ["export", MODEL, "--out", "out"]),
    "hub merge": (hub.main, ["merge", MODEL, "--out", "out"]),
    "hub pack": (hub.main, ["pack", MODEL, "--out", "out"]),
    "hub check": (hub.main, ["check", MODEL, "run"]),
    "distill cache": (distill.main, ["cache", "--teacher", MODEL, "--out", "out"]),
    "plan --init-from": (plan.main, ["--init-from", MODEL]),
    "bench step --init-from": (bench.main, ["step", "--init-from", MODEL]),
    "train --init-from": (None, ["--init-from", MODEL]),
    "train --distill-teacher": (None, ["--objective", "distill", "--distill-teacher", MODEL]),
}


def call(name, monkeypatch):
    main, argv = COMMANDS[name]
    if main is None:
        return parsing.parse(argv, found=infer_settings)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    return main()


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("is_there", [False, True], ids=["no folder", "an empty folder"])
def test_every_command_suggests_the_download_and_creates_no_folder(here, monkeypatch, name, is_there):
    if is_there:
        (here / MODEL).mkdir(parents=True)
    owner = "OWNER/NAME" if is_there else MODEL  # Qwen/ is a folder of this machine then
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError, match=rf"{MODEL}: .*hf download {owner} --local-dir {MODEL}") as raised:
        call(name, monkeypatch)
    assert "\n" not in str(raised.value)
    assert sorted(here.rglob("*")) == before


def test_a_teacher_without_a_checkpoint_is_refused(here, monkeypatch):
    (here / MODEL).mkdir(parents=True)
    (here / MODEL / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"--teacher {MODEL}: has no checkpoint"):
        call("distill cache", monkeypatch)
    assert [path.name for path in (here / MODEL).iterdir()] == ["run.json"]


def test_adapters_without_a_base_are_refused(here, monkeypatch):
    with pytest.raises(ConfigError, match=r"adapters: .*hub import adapters --base"):
        parsing.parse(["--init-from", "adapters"], found=infer_settings)


def test_a_missing_tokenizer_suggests_the_download(here):
    with pytest.raises(ConfigError, match="hf download OWNER/NAME --local-dir nowhere"):
        load_tokenizer("nowhere")
