"""Load any model directory on one device or a mesh: a run, or a folder of a format that a kit registers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.loading.formats import RUN_COPY, format_of
from nash_mhc.loading.weights import default_step, model_shape, on_devices, read_adapted
from nash_mhc.model.architectures import check_random_weights
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.storage.files import Folder, exists, is_remote
from nash_mhc.storage.folders import check_model_folder

log = logging.getLogger(__name__)


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
    model = form.read(path, on_devices(model_shape(cfg.model, cfg.of_kits, cfg.lora), mesh))
    dtype, stops = _compute_dtype(form.dtype or cfg.train.dtype), (tokenizer.end, *form.stops(path))
    return Loaded(cfg, tokenizer, model, 0, dtype, stops, path if form.is_initial else None)


def _load_run(folder: str | Folder, step: int | None, mesh: Mesh | None) -> Loaded:
    check_model_folder("", str(folder))
    run = RunFolder(folder)
    cfg = run.config()
    check_random_weights(cfg.model, run.info().get("drawn"), str(folder))
    beside, tokenizer = _copy_in(run), tokenizer_of(str(folder))
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
        place, shape = functools.partial(on_devices, mesh=mesh), model_shape(cfg.model, cfg.of_kits, cfg.lora)
        if cfg.lora.rank:
            model = read_adapted(run, shape, store, chosen, place)
        else:
            model = store.restore_part(chosen, place(shape), "ema", "model")
    stops = (tokenizer.end, *stop_tokens(str(folder)))
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
        copy = _copy_in(RunFolder(folder))  # the original was moved or deleted
        name = str(copy) if copy is not None and (copy / "tokenizer.json").is_file() else name
    tokenizer = load_tokenizer(name, begin_with_end=cfg.data.begin_with_end)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only {cfg.model.vocab_size}; use "
            "the tokenizer that the model was trained with"
        )
    return tokenizer


def stop_tokens(folder: str) -> Sequence[int]:
    """Return the end-of-text tokens of a model directory, in addition to that of the tokenizer."""
    path = Path(folder) if format_of(folder) is not None else _copy_in(RunFolder(folder))
    form = None if path is None else format_of(path)
    return () if path is None or form is None else form.stops(path)


def shape_of(folder: str, flag: str = "") -> tuple[RunConfig, Any]:
    """Return the configuration and the abstract model that `load` gives."""
    cfg = config_of(folder, flag)
    return cfg, model_shape(cfg.model, cfg.of_kits, cfg.lora)


def _copy_in(run: RunFolder) -> Path | None:
    """Return the run's copy of the companion files of the model that it started from."""
    copy = Path(str(run.path)) / RUN_COPY
    return None if is_remote(run.path) or format_of(copy) is None else copy


def _compute_dtype(trained: str) -> str:
    """bfloat16 is slow on CPUs."""
    return "float32" if jax.devices()[0].platform == "cpu" else trained
