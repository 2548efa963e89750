"""Load any model directory on one device or a mesh: a run, a Hugging Face folder, or a format of a kit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
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
from nash_mhc.hub.folder import CONFIG, RUN_COPY, HubFolder, is_hub_folder, read_weights
from nash_mhc.hub.stored import adapted_shape, default_step, model_shape, read_adapted
from nash_mhc.model.architectures import check_random_weights
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.files import Folder, exists, is_remote
from nash_mhc.storage.folders import check_model_folder

log = logging.getLogger(__name__)


class ModelFormat(NamedTuple):
    """How to read a model directory that is not a run."""

    config: Callable[[Path], RunConfig]
    read: Callable[[Path, Any], Any]  # (folder, shapes with shardings) -> model
    check: Callable[[Path], object] = lambda path: None  # ConfigError if the weights do not match the configuration
    stops: Callable[[Path], Sequence[int]] = lambda path: ()  # end-of-text tokens, beside the tokenizer's own
    dtype: str | None = None  # compute dtype; None: that of the configuration
    is_hub: bool = False  # whether the folder has the companion files of a Hugging Face model


def _hub_config(path: Path) -> RunConfig:
    imported = HubFolder(path).imported
    data = DataConfig(tokenizer=str(path.expanduser()), begin_with_end=False, seq_len=imported.positions)
    return RunConfig(model=imported.model, data=data)


_HUB = ModelFormat(
    config=_hub_config,
    read=lambda path, like: read_weights(HubFolder(path), like),
    check=lambda path: HubFolder(path).check(),
    stops=lambda path: HubFolder(path).stop_tokens(),
    dtype="bfloat16",
    is_hub=True,
)
# By the name of a file in such a directory. A directory with run.json is a run.
FORMATS: Registry[ModelFormat] = Registry("formats", {CONFIG: _HUB})


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    tokenizer: Tokenizer
    model: LanguageModel  # averaged weights if the run has them; adapters are on their base
    step: int
    dtype: str  # compute dtype
    stops: tuple[int, ...]  # end-of-text tokens
    beside: Path | None = None  # files (tokenizer, license, ...) of the Hugging Face model it is or started from


def load(folder: str | Folder, step: int | None = None, *, mesh: Mesh | None = None) -> Loaded:
    """Load a model directory. `step` chooses a run's checkpoint (default: the latest complete one).

    Parameters are sharded over `mesh` as in training (the caller checks that it divides them), or on the first device.
    """
    if (form := format_of(folder)) is None:
        return _load_run(folder, step, mesh)
    if step is not None:
        raise ConfigError(f"--step {step}: {folder} is not a run and has no steps")
    path = Path(str(folder))
    cfg = form.config(path)
    form.check(path)  # before the sizes in the configuration are used
    tokenizer = tokenizer_of(str(folder))
    log.info(f"reading {path} ...")
    model = form.read(path, on_devices(adapted_shape(cfg.model, cfg.lora), mesh))
    dtype, stops = _compute_dtype(form.dtype or cfg.train.dtype), (tokenizer.end, *form.stops(path))
    return Loaded(cfg, tokenizer, model, 0, dtype, stops, path if form.is_hub else None)


def _load_run(folder: str | Folder, step: int | None, mesh: Mesh | None) -> Loaded:
    check_model_folder("", str(folder))
    run = RunFolder(folder)
    cfg = run.config()
    check_random_weights(cfg.model, run.info().get("drawn"), str(folder))
    beside, tokenizer = _hub_copy(run), tokenizer_of(str(folder))
    if not exists(run.checkpoints, kind="directory"):  # first: Store would create it
        raise ConfigError(f"{folder} has no checkpoint; the run saves one every --checkpoint-interval steps and at its end")
    with Store(run.path) as store:
        steps = store.steps()
        if not steps:
            raise ConfigError(f"{run.checkpoints} has no complete checkpoint; wait until the run has saved one")
        if step is not None and step not in steps:
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; its checkpoints: {', '.join(map(str, steps))}")
        chosen = default_step(run, store) if step is None else step
        if chosen is None:
            raise ConfigError(f"{run.checkpoints}: the first checkpoint is still being written; wait, or resume the run")
        log.info(f"reading step {chosen} of {folder} ...")
        place = functools.partial(on_devices, mesh=mesh)
        if cfg.lora.rank:
            model = read_adapted(run, adapted_shape(cfg.model, cfg.lora), store, chosen, place)
        else:
            model = store.restore_part(chosen, place(model_shape(cfg.model, cfg.of_kits)), "ema", "model")
    stops = (tokenizer.end, *(HubFolder(beside).stop_tokens() if beside is not None else []))
    return Loaded(cfg, tokenizer, model, chosen, _compute_dtype(cfg.train.dtype), stops, beside)


def config_of(folder: str, flag: str = "") -> RunConfig:
    """Return the configuration of a model directory that `flag` names."""
    if (form := format_of(folder)) is not None:
        return form.config(Path(folder))
    check_model_folder(flag, folder)
    return RunFolder(folder).config()


def tokenizer_of(folder: str) -> Tokenizer:
    """Load the tokenizer of a model directory; raise ConfigError if it has more tokens than the model."""
    cfg = config_of(folder)
    name = cfg.data.tokenizer
    if format_of(folder) is None and name != "bytes" and not Path(name).exists():
        copy = _hub_copy(RunFolder(folder))  # the original was moved or deleted
        name = str(copy) if copy is not None and (copy / "tokenizer.json").is_file() else name
    tokenizer = load_tokenizer(name, begin_with_end=cfg.data.begin_with_end)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only {cfg.model.vocab_size}; use "
            "the tokenizer that the model was trained with"
        )
    return tokenizer


def shape_of(folder: str, flag: str = "") -> tuple[RunConfig, Any]:
    """Return the configuration and the abstract model that `load` gives."""
    cfg = config_of(folder, flag)
    if format_of(folder) is None and not cfg.lora.rank:
        return cfg, model_shape(cfg.model, cfg.of_kits)
    return cfg, adapted_shape(cfg.model, cfg.lora)


def format_of(folder: str | Folder) -> ModelFormat | None:
    """Return how to read a model directory, or None for a run."""
    path = Path(str(folder)).expanduser()
    if is_remote(folder) or (path / "run.json").exists():
        return None
    return next((FORMATS[name] for name in FORMATS if (path / name).is_file()), None)


def _hub_copy(run: RunFolder) -> Path | None:
    """Return the run's copy of the files of the Hugging Face model that it started from."""
    if is_remote(run.path):
        return None
    copy = Path(str(run.path)) / RUN_COPY
    return copy if is_hub_folder(copy) else None


def on_devices(model: Any, mesh: Mesh | None) -> Any:
    """Add shardings to an abstract model: over the mesh as in training, or on this machine's first device."""
    if mesh is not None:
        return with_shardings(model, mesh)
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), model)


def _compute_dtype(trained: str) -> str:
    """bfloat16 is slow on CPUs."""
    return "float32" if jax.devices()[0].platform == "cpu" else trained
