"""A folder -> configuration, tokenizer and weights, on one device or a mesh: of a run of ours, or of Hugging Face's
kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, DataConfig, RunConfig
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.hub.folder import HubFolder, is_hub_folder
from nash_mhc.hub.reading import read_weights
from nash_mhc.hub.stored import adapted_shape, chosen_step, model_shape, read_adapted
from nash_mhc.model.architectures import abstract_model, check_drawn
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.files import Folder, exists, is_remote
from nash_mhc.storage.folders import check_model_folder

BESIDE_RUN = "hub"  # folder of a run that has the files of the Hugging Face model that it began with, weights excepted


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    tokenizer: Tokenizer
    model: LanguageModel  # the averaged weights where the run kept them; of a run with adapters, those on its base
    step: int
    dtype: str  # to compute in
    stops: tuple[int, ...]  # tokens that end a text
    beside: Path | None = None  # where the files of the Hugging Face model lie that it is or began with


class ModelFormat(NamedTuple):
    """How to read model folders of a kit."""

    config: Callable[[Path], RunConfig]
    read: Callable[[Path, Any], Any]  # (folder, shapes with shardings) -> model


FORMATS: Registry[ModelFormat] = Registry("formats", {})  # by the name of a file that only such folders have


def format_of(folder: str | Folder) -> ModelFormat | None:
    """Return how to read a folder of a kit's format, or None for a run or a Hugging Face folder."""
    if is_remote(folder):
        return None
    files = (name for name in FORMATS if (Path(str(folder)).expanduser() / name).is_file())
    return next((FORMATS[name] for name in files), None)


def load(
    folder: str | Folder,
    step: int | None = None,
    *,
    mesh: Mesh | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Loaded:
    """The run in `folder` at `step` (default:
    its last checkpoint), on this machine's first device, whatever mesh wrote it.

    On `mesh`, where one is given, every parameter lies as in training; that the model divides over it is for the caller
    to check. `say` hears of the reading, once nothing stands in its way.
    """
    if not is_remote(folder) and is_hub_folder(str(folder)):
        return _of_hub(Path(str(folder)), step, mesh, say)
    if (found := format_of(folder)) is not None:
        return _of_format(found, Path(str(folder)), step, mesh, say)
    check_model_folder("", str(folder))
    run = RunFolder(folder)
    cfg = run.config()
    check_drawn(cfg.model, run.info().get("drawn"), str(folder))
    beside = _beside(run)
    tokenizer = tokenizer_of(str(folder))
    if not exists(run.checkpoints, kind="directory"):  # asked first: opening a Store would make the folder
        raise ConfigError(f"{folder} holds no checkpoint; the run saves its first one at --checkpoint-interval or at its end")
    with Store(run.path) as store:
        steps = store.steps()
        if not steps:
            raise ConfigError(f"{run.checkpoints} holds no finished checkpoint; let the run reach its first save")
        if step is not None and step not in steps:
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {', '.join(map(str, steps))}")
        chosen = chosen_step(run, store, say) if step is None else step
        if chosen is None:
            raise ConfigError(f"{run.checkpoints}: its first save has not ended; wait for it, or let the run go on")
        say(f"reading step {chosen} of {folder} ...")
        place = functools.partial(on_devices, mesh=mesh)
        if cfg.lora.rank:
            model = read_adapted(run, cfg, store, chosen, place, say)
        else:
            model = store.restore_part(chosen, place(model_shape(cfg)), "ema", "model")
    stops = HubFolder(beside).stops() if beside is not None else []
    return Loaded(cfg, tokenizer, model, chosen, _dtype(cfg.train.dtype), (tokenizer.end, *stops), beside)


def tokenizer_of(folder: str) -> Tokenizer:
    """Of either kind of folder, without its weights. ConfigError where it has more tokens than the model."""
    cfg, name = config_of(folder), folder
    if is_remote(folder) or not is_hub_folder(folder):
        name = cfg.data.tokenizer if format_of(folder) else _tokenizer(cfg, _beside(RunFolder(folder)))
    tokenizer = load_tokenizer(name, begin_with_end=cfg.data.begin_with_end)
    _check_vocabulary(folder, tokenizer, cfg.model.vocab_size)
    return tokenizer


def _check_vocabulary(where: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """ConfigError for a tokenizer with tokens that the model does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{where}: its tokenizer has {tokenizer.vocab_size} tokens, its model only {vocab_size}; put the tokenizer there "
            "that the model was trained with"
        )


def config_of(folder: str, flag: str = "") -> RunConfig:
    """Of either kind of folder, which `flag` names, without anything else of it. ConfigError."""
    if not is_remote(folder) and is_hub_folder(folder):
        return _hub_config(HubFolder(folder))
    if (found := format_of(folder)) is not None:
        return found.config(Path(folder))
    check_model_folder(flag, folder)
    return RunFolder(folder).config()


def shape_of(folder: str, flag: str = "") -> tuple[RunConfig, Any]:
    """Its configuration, and the tree of the model that `load` gives, with shapes for arrays. ConfigError."""
    cfg = config_of(folder, flag)
    is_run = is_remote(folder) or not (is_hub_folder(folder) or format_of(folder))
    return cfg, model_shape(cfg) if is_run and not cfg.lora.rank else adapted_shape(cfg)


def _hub_config(folder: HubFolder) -> RunConfig:
    data = DataConfig(tokenizer=str(folder.path), begin_with_end=False, seq_len=folder.imported.positions)
    return RunConfig(model=folder.imported.model, data=data)


def _of_hub(path: Path, step: int | None, mesh: Mesh | None, say: Callable[[str], None]) -> Loaded:
    if step is not None:
        raise ConfigError(f"--step {step}: {path} is no run, and has no steps")
    folder = HubFolder(path)
    folder.check()  # before anything is made of the sizes that its config.json names
    cfg = _hub_config(folder)
    tokenizer = tokenizer_of(str(path))
    say(f"reading {path} ...")
    model = read_weights(folder, on_devices(abstract_model(cfg.model), mesh), say)
    return Loaded(cfg, tokenizer, model, 0, _dtype("bfloat16"), (tokenizer.end, *folder.stops()), path)


def _of_format(form: ModelFormat, path: Path, step: int | None, mesh: Mesh | None, say: Callable[[str], None]) -> Loaded:
    if step is not None:
        raise ConfigError(f"--step {step}: {path} is no run, and has no steps")
    cfg = form.config(path)
    tokenizer = tokenizer_of(str(path))
    say(f"reading {path} ...")
    model = form.read(path, on_devices(adapted_shape(cfg), mesh))
    return Loaded(cfg, tokenizer, model, 0, _dtype(cfg.train.dtype), (tokenizer.end,))


def _beside(run: RunFolder) -> Path | None:
    if is_remote(run.path):
        return None
    found = Path(str(run.path)) / BESIDE_RUN
    return found if is_hub_folder(found) else None


def _tokenizer(cfg: RunConfig, beside: Path | None) -> str:
    """The run's own; where it has been moved or deleted since, the copy that came with the model."""
    named, copy = cfg.data.tokenizer, beside is not None and (beside / "tokenizer.json").is_file()
    return str(beside) if copy and named != "bytes" and not Path(named).exists() else named


def on_devices(model: Any, mesh: Mesh | None) -> Any:
    """Return the shapes with shardings: as in training on a mesh, else all on the first device of this machine."""
    if mesh is not None:
        return with_shardings(model, mesh)
    at = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), model)


def _dtype(trained: str) -> str:
    """A CPU is slow at bfloat16, which an accelerator's run may have used."""
    return "float32" if jax.devices()[0].platform == "cpu" else trained
