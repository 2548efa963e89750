"""Whether what --init-from and --resume-from name has weights that fit the run: asked before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.key_names import of_any_kind
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, ModelConfig, RunConfig
from nash_mhc.hub.folder import HubFolder, is_hub_folder
from nash_mhc.hub.importing import check_fits
from nash_mhc.model.architectures import abstract_model
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.errors import one_line
from nash_mhc.storage.files import exists
from nash_mhc.storage.paths import is_remote


def check_weights(cfg: RunConfig, name: str) -> None:
    """What --init-from names has weights that fit this run's model."""
    if is_remote(name) or not is_hub_folder(name):
        folder = other_run("--init-from", name)
        _checkpoint_of(folder, cfg.train.init_step)
        _check_shapes(cfg, folder)
        return
    if cfg.train.init_step is not None:
        raise ConfigError(f"--init-step {cfg.train.init_step}: {name} is a Hugging Face model, and has no steps")
    if not isinstance(cfg.model, ModelConfig):
        raise ConfigError(f"--init-from {name}: a Hugging Face model cannot become a {cfg.model.architecture}")
    model = HubFolder(name)
    model.check()
    check_fits(model, cfg.model)


def _check_shapes(cfg: RunConfig, folder: RunFolder) -> None:
    """ConfigError where the run's model has parameters of other shapes than that of the folder."""
    try:
        theirs = folder.config().model
    except ConfigError:
        return  # lost, or of another version: what does not fit is found when the weights are read
    if type(cfg.model) is not type(theirs) or _shapes(cfg.model) == _shapes(theirs):
        return
    was, now = vars(theirs), vars(cfg.model)
    changed = [name for name in now if now[name] != was[name]]
    # Of what differs, that by which alone the shapes differ; where that is no single key, all of it.
    alone = [name for name in changed if _shapes_differ(theirs, name, now[name])] or changed
    flags = [of_any_kind(f"model.{name}").flag for name in alone]
    raise ConfigError(
        f"--init-from {folder}: its weights have other shapes: "
        + ", ".join(f"model.{name} {was[name]} there, {now[name]} now" for name in alone)
        + f"; leave {' and '.join(flags)} out, or train from fresh weights without --init-from"
    )


def _shapes(model: ArchitectureConfig) -> dict[str, Any]:
    """Of each parameter, by its name."""
    return {name: array.shape for name, array in named_leaves(abstract_model(model)).items()}


def _shapes_differ(model: ArchitectureConfig, name: str, value: Any) -> bool:
    """Whether this key alone gives the model other shapes."""
    try:
        return _shapes(dataclasses.replace(model, **{name: value})) != _shapes(model)  # type: ignore[type-var]
    except ConfigError:
        return True


def other_run(flag: str, name: str) -> RunFolder:
    """The folder of another run that has checkpoints; ConfigError."""
    with one_line(f"{flag} {name}"):
        found = exists(RunFolder(name).checkpoints, kind="directory")
    if not found:
        raise ConfigError(f"{flag} {name}: no run with checkpoints there; give the --checkpoint-dir of an earlier run")
    return RunFolder(name)


def _checkpoint_of(folder: RunFolder, step: int | None) -> None:
    steps = folder.steps()
    if not steps or (step is not None and step not in steps):
        asked = "" if step is None else f" --init-step {step}"
        raise ConfigError(
            f"--init-from {folder}{asked}: no such checkpoint there; it has {', '.join(map(str, steps)) or 'none'}"
        )
