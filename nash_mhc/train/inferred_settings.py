"""Infer settings from directories that the user names: prepared data, a run, or a Hugging Face model.

They override the preset, and the user's own settings override them; `--print-config` shows the origin of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import kits, presets
from nash_mhc.config.fields import type_name
from nash_mhc.config.keys import OURS, keys, sections
from nash_mhc.config.parsing import Settings
from nash_mhc.config.presets import profile_settings
from nash_mhc.config.recorded import is_unused
from nash_mhc.config.schema import (
    ARCHITECTURES,
    ConfigError,
    RunConfig,
    architecture_config,
    missing_section,
    weighted_parts,
)
from nash_mhc.data.prepared.folder import FILE, Manifest
from nash_mhc.data.sources import source_of
from nash_mhc.data.tokenizer import FILES, is_of_model, load_tokenizer
from nash_mhc.loading.formats import initial_format
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.folders import check_model_folder

_BEGIN = "data.begin_with_end"
_OF_MODEL = ("data.tokenizer", _BEGIN)  # settings of the data that belong to a model
_OF_PREPARED = ("seq_len", "split", "eval_split", "validation_fraction")
_OF_READING = ("batch_size", "num_workers", "worker_buffer_size", "cache_dir")  # how data is read, not which data
OF_DATA = {path for path in keys() if path.startswith("data.")} - {f"data.{name}" for name in _OF_READING}
_NAME_A_VOCABULARY = ("data.dataset", "data.tokenizer", "train.init_from", "train.resume_from", "train.checkpoint_dir")


def infer_settings(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    """For `parse`: infer settings from `given`, the user's settings, and `values`, all settings without inference."""
    own, found = values["train.checkpoint_dir"], dict[str, Any]()
    for flag, path in (("--init-from", "train.init_from"), ("--resume-from", "train.resume_from")):
        # A run with a checkpoint has recorded these settings, and resumes even if that model is gone.
        if values[path] is not None and (own is None or not _has_checkpoint(own)):
            found |= _of_model(flag, values[path], values["model_kind"], with_data="data.dataset" not in given)
    values = {**values, **{path: value for path, (value, _) in found.items()}, **given}
    prepared = _of_prepared(values["data.dataset"])
    # The prepared data determines the begin token, not the data that the model was trained on before.
    found = prepared | found | {path: setting for path, setting in prepared.items() if path == _BEGIN}
    dataset = values["data.dataset"]
    source = None if weighted_parts(dataset) else source_of(dataset, values["data.format"])
    found |= {} if source is None else source.infers(values)
    found |= ARCHITECTURES[values["model_kind"]].infers(values, found)
    if (platform := values["mesh.profile_for"]) is not None:
        found |= profile_settings(platform, values)
    for path, key in keys(values["model_kind"]).items():
        if key.metadata.get("model_folder") and values[path] is not None:
            check_model_folder(key.flag, values[path])
    so_far = {**values, **{path: value for path, (value, _) in found.items()}, **given}
    name = so_far["data.tokenizer"]
    if _BEGIN not in {**given, **found} and is_of_model(name):
        found[_BEGIN] = (False, f"tokenizer {name}")
    if "model.vocab_size" not in {**given, **found}:
        found["model.vocab_size"] = (load_tokenizer(name).vocab_size, f"tokenizer {name}")
    return found


def infer_without_tokenizer(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    """Infer settings for a plan or a benchmark, which need no tokenizer."""
    return infer_settings(with_preset_vocabulary(given, values["model.vocab_size"]), values)


def with_preset_vocabulary(given: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Add the preset's vocabulary size to the settings, unless they name data or a model."""
    named = any(given.get(path) is not None for path in _NAME_A_VOCABULARY)
    return dict(given) if named or "model.vocab_size" in given else {**given, "model.vocab_size": vocab_size}


def _of_prepared(dataset: str) -> Settings:
    """Return the settings of prepared data; for a mixture, those that all of its prepared parts share."""
    folders = [Path(name) for name in [name for name, _ in weighted_parts(dataset)] or [dataset]]
    recipes = {folder: Manifest.read(folder).recipe for folder in folders if (folder / FILE).exists()}
    if not recipes:
        return {}
    (folder, recipe), *others = recipes.items()
    same = lambda name: all(other[name] == recipe[name] for _, other in others)
    found = {f"data.{name}": recipe[name] for name in _OF_PREPARED if same(name)}
    if same("tokenizer"):
        found["data.tokenizer"] = str(folder / "tokenizer") if (folder / "tokenizer").exists() else "bytes"
        found[_BEGIN] = "begin" not in recipe["tokenizer"]
    return {path: (value, f"prepared data {folder}") for path, value in found.items()}


def _of_model(flag: str, folder: str, model_kind: str, *, with_data: bool) -> Settings:
    """Return the model and tokenizer of a run or Hugging Face model to start from; `with_data`, also a run's data."""
    if flag == "--init-from" and (form := initial_format(flag, folder)) is not None:
        found = {f"model.{name}": value for name, value in vars(form.config(Path(folder)).model).items()}
        if any((Path(folder) / name).is_file() for name in FILES):
            found["data.tokenizer"] = folder
        return {path: (value, f"{flag} {folder}") for path, value in found.items()}
    with as_config_error(f"{flag} {folder}"):
        described = RunFolder(folder).description()
    if flag == "--init-from" and described is None:
        check_model_folder(flag, folder)
    # Runs of older versions lack the key; their documents have a begin token.
    known = {} if described is None else {_BEGIN: True} | described.config
    if (its := known.get("model_kind", model_kind)) != model_kind:
        raise ConfigError(
            f"{flag} {folder}: that model has --model-kind {its}, but this run has {model_kind}; use --model-kind {its}"
        )
    has_data = with_data and not RunFolder(folder).is_imported()
    wanted = {k: v for k, v in known.items() if k.startswith("model.") or k in _OF_MODEL or (has_data and k in OF_DATA)}
    return {path: (value, f"{flag} {folder}") for path, value in wanted.items()}


def _has_checkpoint(folder: str) -> bool:
    with as_config_error(f"--checkpoint-dir {folder}"):
        return RunFolder(folder).has_checkpoint()


def _check_kits(folder: str, recorded: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError if the run uses a kit that is missing."""
    try:
        architecture_config(kind)
        for path, value in recorded.items():
            section, _, name = path.rpartition(".")
            if section and section not in sections() and not is_unused(section, {name: value}):
                raise missing_section(section, sections())
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def recorded_settings(folder: str, given: Mapping[str, Any]) -> Settings:
    """For `parse`: return the settings that the run in this directory recorded; {} if `given` has another kind or size.

    A run without a checkpoint may start again with other data or another tokenizer; recorded settings that follow from
    those are then left out.
    """
    run = RunFolder(folder)
    with as_config_error(f"--checkpoint-dir {folder}"):
        known = {} if run.is_imported() else run.settings()
        has_checkpoint = bool(known) and run.has_checkpoint()
    # A damaged file may hold any types; bounds and choices are checked when the configuration is built.
    known = {path: value for path, value in known.items() if value is None or isinstance(value, bool | int | float | str)}
    if "kit" not in given and isinstance(folders := known.get("kit"), str):
        kits.use(folders, recorded=True)
    if any(given.get(name, known.get(name)) != known.get(name) for name in ("model_size", "model_kind")):
        return {}
    kind = known.get("model_kind", OURS)
    _check_kits(folder, known, kind)
    if known.get("model_size", RunConfig.model_size) not in presets.sizes(kind):
        return {}
    for path, key in keys(kind).items():
        value = known.get(path)
        if isinstance(value, str) != (str in key.kinds) and value is not None:
            raise ConfigError(f"{folder}: {path} in run.json is {value!r}, but must be {type_name(key.annotation)}")
    left_out: set[str] = set()
    if has_checkpoint:
        known.setdefault(_BEGIN, True)  # the default of older versions
        described = run.description()
        if known.get("train.init_from") is not None:  # the model that the run began with, as an absolute path
            known["train.init_from"] = (described.init_from or {}).get("folder") if described is not None else None
        left_out |= {"train.init_step", "train.resume_from"}
    elif "data.dataset" in given:
        left_out |= {path for path in known if path in OF_DATA} | {"model.vocab_size"}
    elif "data.tokenizer" in given:
        left_out.add("model.vocab_size")
    if "train.total_steps" in given:
        known["train.epochs"] = None
        warmup = known.get("optim.warmup_steps")
        if isinstance(warmup, int) and warmup > given["train.total_steps"]:
            left_out.add("optim.warmup_steps")
    if "train.remat" in given:
        left_out.add("train.remat_keep")
    return {path: (value, f"the run {folder}") for path, value in known.items() if path not in left_out}
