"""What a mesh must divide, and what is proposed where it does not."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from settings_small import SMALL, changed

from nash_mhc.config.parsing import parse
from nash_mhc.config.schema import (
    ConfigError,
    MeshConfig,
    ModelConfig,
    RunConfig,
)
from nash_mhc.kits.recursive.settings import RecursiveConfig
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.parallel.mesh import check_fit, indivisible_sizes, mesh_shape

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


def fits(cfg: RunConfig, shape: dict[str, int]) -> None:
    check_fit(cfg.data, cfg.model, shape, resizable=cfg.resizable)


def refused(cfg: RunConfig, shape: dict[str, int]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        fits(cfg, shape)
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
    assert re.search(rf"{flag} \d+ (and .*)?cannot be split over [a-z x]+ = \d+", str(error))
    mesh, sizes = remedies(error)
    assert mesh[0] == "--mesh-data"
    assert sizes[0] == flag
    # Behind the others on a command line, the flags give a valid configuration that fits.
    fits(parse([*as_argv(cfg), *sizes]).config, shape)
    fits(cfg, parse(mesh).config.mesh.axes)


def test_every_size_that_does_not_divide_is_told_at_once() -> None:
    cfg = changed(SMALL, data={"batch_size": 10, "seq_len": 56}, model={"width": 18, "heads": 6, "kv_heads": 6, "ffn": 30})
    error = refused(cfg, {"data": 1, "fsdp": 4, "tp": 16})
    wanted = {"--batch-size 10", "--seq-len 56", "--model-width 18", "--model-heads 6", "--model-kv-heads 6", "--model-ffn 30"}
    assert set(re.findall(r"--\S+ \d+", str(error).partition("; try ")[0])) == wanted


def test_weights_that_are_given_keep_their_sizes(tmp_path: Path) -> None:
    """Where a run starts from weights, or its rows are prepared, only another mesh is proposed."""
    cfg, shape = FITS["--model-width"]
    assert len(remedies(refused(changed(cfg, train={"init_from": "runs/base"}), shape))) == 1
    cfg, shape = FITS["--seq-len"]
    assert len(remedies(refused(changed(cfg, data={"dataset": str(tmp_path)}), shape))) == 1
    cfg, shape = FITS["--model-width"]
    with pytest.raises(ConfigError) as error:
        check_fit(cfg.data, cfg.model, shape, resizable=())
    assert len(remedies(error.value)) == 1


KINDS = {
    "nash-mhc": lambda draw: ModelConfig(
        vocab_size=257, width=draw(4, 40), layers=1, heads=(heads := draw(1, 12)), kv_heads=heads, head_dim=4, ffn=draw(4, 40),
        scales=draw(1, 3), ratio=2,
    ),
    "reservoir": lambda draw: ReservoirConfig(
        vocab_size=257, width=draw(4, 40), layers=1, units=(ring := draw(2, 4)) * draw(2, 20), ring=ring, ffn=draw(4, 40),
        unit="tanh",
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
    while refusals < 30:
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
    assert refusals == 30


def mesh_argv(cfg: RunConfig) -> list[str]:
    return [f"mesh.{name}={value}" for name, value in {**cfg.mesh.axes, "num_devices": cfg.mesh.num_devices}.items()]


def fitted(cfg: RunConfig, there: int) -> None:
    shape = mesh_shape(cfg.mesh, "gpu", there, lambda shape: not indivisible_sizes(cfg.data, cfg.model, shape))
    fits(cfg, dict(zip(cfg.mesh.axes, shape, strict=True)))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 1, 4), (2, 2, 2)])
def test_what_divides_is_accepted(shape: tuple[int, int, int]) -> None:
    fits(SMALL, dict(zip(("data", "fsdp", "tp"), shape, strict=True)))
