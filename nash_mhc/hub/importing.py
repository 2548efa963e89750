"""`hub import`: a Hugging Face folder -> a folder of ours, whose one checkpoint every command can start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx

from nash_mhc import __version__
from nash_mhc.checkpoint.run_folder import RUN
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import ConfigError, ModelConfig
from nash_mhc.data.tokenizer import FILES
from nash_mhc.hub.folder import TENSOR_DTYPES, HubFolder, files_beside, is_hub_folder, tensor_dtypes
from nash_mhc.hub.load import BESIDE_RUN, Loaded, load
from nash_mhc.model.architectures import count_parameters
from nash_mhc.storage.folders import check_is_new, new_folder

# A model that is trained on may look further or otherwise at what it reads; its weights have the shapes that they have.
_FREE = ("window", "full_every", "rope_theta", "rope_scaling", "norm_eps")


class _Weights(eqx.Module):
    """A state of which nothing is known but the model."""

    model: Any


def import_folder(folder: Path, out: Path, say: Callable[[str], None] = lambda text: None) -> Loaded:
    """Makes `out`, whole or not at all. ConfigError."""
    check_is_new(out)
    loaded = load(folder, say=say)
    with new_folder(out) as part:
        for name, content in contents_beside(folder).items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_bytes(content)
        config = loaded.config.to_dict()
        config["data"]["tokenizer"] = str(out / BESIDE_RUN)
        say(f"writing {out} ...")
        write_model(part, loaded.model, config, imported=folder.name, parameters=count_parameters(loaded.config.model))
    return loaded


def write_model(folder: Path, model: Any, config: dict[str, Any], *, base: Any = None, **known: Any) -> None:
    """What a command reads of a run: its configuration, and one checkpoint, of nothing but weights.

    `base`: the weights that these are adapters of. `known`: what run.json says besides.
    """
    values = {"step": 0, "config": config, "data": {"rows": "none"}} | ({} if base is None else {"base": base})
    with Store(folder) as store:
        store.save(0, _Weights(model), values)
    run = {"config": config, "rows": "none", "init_from": base, "versions": {"nash_mhc": __version__}} | known
    (folder / RUN).write_text(json.dumps(run, indent=2) + "\n")


def settings_of(folder: Path) -> dict[str, Any]:
    """What a run that starts from such a folder need not be told: its model, and its tokenizer."""
    found = HubFolder(folder)
    model = {f"model.{name}": value for name, value in vars(found.imported.model).items()}
    has_tokenizer = any((folder / name).is_file() for name in FILES)
    return model | ({"data.tokenizer": str(folder)} if has_tokenizer else {})


def check_fits(folder: HubFolder, cfg: ModelConfig) -> None:
    """Whether a run's model can take these weights; ConfigError names the setting that is in the way."""
    theirs = vars(folder.imported.model)
    for name, value in vars(cfg).items():
        if name not in _FREE and value != theirs[name]:
            raise ConfigError(
                f"model.{name} {value}: {folder.path} has {theirs[name]}; leave it out, its config.json says what the model is"
            )


def contents_beside(folder: Path) -> dict[str, bytes]:
    """The small files of a model, for the folder of a run that starts from it: file name -> content.

    `folder` is of Hugging Face's kind, or a run's that has them from there. Empty: they are of no such origin.
    """
    folder = folder if is_hub_folder(folder) else folder / BESIDE_RUN
    if not is_hub_folder(folder):
        return {}
    found = {f"{BESIDE_RUN}/{name}": (folder / name).read_bytes() for name in files_beside(folder)}
    if dtypes := tensor_dtypes(folder):
        found[f"{BESIDE_RUN}/{TENSOR_DTYPES}"] = (json.dumps(dtypes, indent=0) + "\n").encode()
    return found
