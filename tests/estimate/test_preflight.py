"""Runs that cannot fit are refused with settings that would; running out of memory gives advice, too."""

import dataclasses
import json
import re
import shlex

import jax
import pytest
import small
from command_process import CommandProcess
from runs import RUN, at, described_run

from nash_mhc.config import ConfigError, parsing
from nash_mhc.config.schema import ObjectiveConfig
from nash_mhc.estimate import preflight
from nash_mhc.estimate.candidates import with_remat
from nash_mhc.estimate.memory import estimate
from nash_mhc.kits.distill.settings import DistillConfig
from nash_mhc.model.architectures import count_parameters
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.inputs import resolve

NASH = dataclasses.replace(small.config(data__batch_size=8, data__seq_len=256), model=small.NASH)


def sizes_of(cfg):
    resolved, mesh = resolve(cfg)
    return resolved, mesh, estimate(resolved, mesh.shape).total


def with_flags(cfg, flags):
    """Apply flags as if typed after the others."""
    words = shlex.split(flags)
    given = parsing.parse(words).given
    sections = {
        name: {k.partition(".")[2]: v for k, v in given.items() if k.startswith(f"{name}.")}
        for name in ("data", "train", "mesh")
    }
    return dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **v) for name, v in sections.items()})


def settings_in(message):
    return re.findall(r"(--[a-z][^()]*?) \([\d.]+ [GM]iB\)", message)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_what_cannot_fit_is_refused_with_settings_that_do(monkeypatch, tmp_path, share):
    cfg, _, total = sizes_of(NASH)
    room = share * total
    monkeypatch.setattr(preflight, "device_capacity", lambda mesh: room)
    with pytest.raises(
        ConfigError, match=r"^this run needs about .* per device .*, but only .* is available; .* --no-preflight$"
    ) as refused:
        at(tmp_path / "run", cfg)
    assert not (tmp_path / "run").exists()  # nothing is left behind
    found = settings_in(str(refused.value))
    assert found
    for flags in found:
        _, _, size = sizes_of(with_flags(cfg, flags))
        assert size <= room


def test_settings_that_change_least_come_first():
    cfg, mesh, total = sizes_of(NASH)
    first, *others = preflight.smaller(cfg, mesh.shape, 0.8 * total)
    assert "--mesh" not in first.flags  # one device stays one
    assert len({remedy.flags for remedy in [first, *others]}) == 1 + len(others) <= 3


def test_who_insists_gets_a_warning_and_a_run_that_knows_what_was_expected(monkeypatch, tmp_path, messages):
    monkeypatch.setattr(preflight, "device_capacity", lambda mesh: 1.0)
    with pytest.raises(ConfigError, match=r"no layout of it fits; use a smaller --model-size or --seq-len, .* more devices"):
        at(tmp_path, RUN)
    cfg, mesh, total = sizes_of(RUN)
    expected = preflight.preflight(cfg, mesh, no_preflight=True)
    assert "--no-preflight" in messages[0]
    assert expected["gib"] == pytest.approx(total / 2**30) == pytest.approx(sum(expected["gib_by_category"].values()))


def test_a_teacher_and_an_anchor_count(monkeypatch, tmp_path):
    """If only the student fits, a run with teachers is refused, and the largest parts are named."""
    wide = dataclasses.replace(small.MODEL, width=512, ffn=1024, head_dim=64)
    described_run(tmp_path / "teacher", dataclasses.replace(RUN, model=wide))
    taught = dataclasses.replace(
        RUN,
        objective=ObjectiveConfig(name="distill"),
        of_kits=(DistillConfig(teacher=str(tmp_path / "teacher"), anchor=0.5, top_k=4),),
        train=dataclasses.replace(RUN.train, init_from=str(tmp_path / "teacher")),
    )
    cfg, mesh, total = sizes_of(taught)
    alone = sizes_of(RUN)[2]
    weights = 2 * 4 * count_parameters(wide)
    assert weights <= total - alone < 1.2 * weights
    expected = preflight.preflight(cfg, mesh)
    assert expected["gib_by_category"]["teachers"] == weights / 2**30
    monkeypatch.setattr(preflight, "device_capacity", lambda mesh: 2.0 * alone)
    with pytest.raises(ConfigError, match=r"teachers [\d.]+ [GM]iB: set by .*--objective"):
        preflight.preflight(cfg, mesh)


def test_the_runs_folder_keeps_what_was_expected(tmp_path):
    at(tmp_path, RUN, evaluated=False)
    _, _, total = sizes_of(RUN)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["expected"]["gib"] == pytest.approx(total / 2**30)
    assert info["expected"]["room_gib"] > info["expected"]["gib"]


def test_memory_that_runs_out_is_explained_with_settings_that_hold_less():
    cfg, mesh, total = sizes_of(NASH)
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.00GiB. [tf-allocator]")
    message = str(preflight.out_of_memory(*resolve(NASH), error, "the same command"))
    assert "(Out of memory while trying to allocate 1.00GiB)" in message
    assert "\n" not in message
    found = settings_in(message)
    assert found
    for flags in found:
        assert sizes_of(with_flags(cfg, flags))[2] < 0.85 * total
    # The largest parts are named, with their causes.
    memory = estimate(cfg, mesh.shape)
    parts = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
    for name in sorted(parts, key=lambda n: -parts[n])[:3]:
        assert re.search(rf"{name} [\d.]+ [GM]iB: set by ", message)


def test_what_was_known_to_be_too_much_is_answered_with_what_there_is_room_for(monkeypatch):
    """After --no-preflight, the remedies fit the devices, not only need less than the estimate."""
    cfg, _, total = sizes_of(NASH)
    monkeypatch.setattr(preflight, "device_capacity", lambda mesh: 0.7 * total)
    found = settings_in(
        str(preflight.out_of_memory(*resolve(NASH), RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "again"))
    )
    assert found
    for flags in found:
        assert sizes_of(with_flags(cfg, flags))[2] < 0.85 * 0.7 * total


def test_the_best_mesh_for_the_devices_here_is_taken(messages):
    count = jax.device_count()
    asked = dataclasses.replace(NASH, mesh=dataclasses.replace(NASH.mesh, num_devices=count))
    best = preflight.fastest_here(asked, {})
    shape = make_mesh(best.mesh).shape
    assert shape["data"] * shape["fsdp"] * shape["tp"] == count > 1
    assert best.data.batch_size * best.train.grad_accum == asked.data.batch_size * asked.train.grad_accum
    assert messages[0].startswith("--mesh-auto: --mesh-data ")
    kept = preflight.fastest_here(asked, {"mesh.tp": 2, "train.remat": "full"})
    assert kept.mesh.tp == 2
    assert kept.train.remat == asked.train.remat  # the user's settings stay


def test_mesh_auto_emulates_devices(tmp_path):
    """The number of emulated devices must be set before JAX starts a backend."""
    small_model = "--model-layers 1 --model-width 32 --model-ffn 64 --seq-len 64".split()
    words = ["-m", "nash_mhc.train", "--mesh-auto", "--num-devices", "4", "--print-config", *small_model]
    done = CommandProcess(words, tmp_path, XLA_FLAGS=None).end()
    assert done.returncode == 0, done.stderr
    assert "--mesh-auto: --mesh-data " in done.stdout + done.stderr


def test_a_mesh_that_does_not_fit_is_not_taken(monkeypatch):
    monkeypatch.setattr(preflight, "device_capacity", lambda mesh: 1000.0)
    with pytest.raises(ConfigError, match=r"^--mesh-auto: nothing fits: the smallest layout needs "):
        preflight.fastest_here(NASH, {})


@pytest.mark.parametrize("share, wanted", [(1.2, "none"), (1.0, "dots+ffn-up"), (1e-9, "full")])
def test_remat_auto_is_the_fastest_that_fits(share, wanted, monkeypatch):
    """With a tenth more memory than the estimate, nothing is recomputed; where nothing fits, everything is."""
    cfg = small.nash_config(train__remat="auto", train__dtype="float32", train__attention="xla", train__unroll="no")
    need = estimate(with_remat(cfg, ("none", None)), {"data": 1, "fsdp": 1, "tp": 1}).total
    monkeypatch.setattr("nash_mhc.train.inputs.device_capacity", lambda mesh: share * need)
    resolved, _ = resolve(cfg)
    assert resolved.train.kept == wanted
