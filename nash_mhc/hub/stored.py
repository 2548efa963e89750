"""Weights that lie in a folder, of a run or of Hugging Face's kind: found once, known by their hash, read by anyone.

A run with adapters keeps no copy of its base. It writes down where the base lies and what its hash is, and whoever
reads the run's model reads the base from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.hub.folder import CONFIG, HubFolder, is_hub_folder
from nash_mhc.hub.reading import read_weights
from nash_mhc.model.architectures import abstract_model, with_weight_modules
from nash_mhc.model.lora import adapted, adapters_of, base_of, merged, on_base
from nash_mhc.model.weights import bases, count_by_storage, has_derived, materialized
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.storage.files import digest_of, digests_of_files, exists, is_remote
from nash_mhc.storage.folders import check_model_folder

Record = dict[str, Any]  # of run.json: where weights lie, and how to know that they are the same
Say = Callable[[str], None]
_MOVED = "; where it has moved, train RUN --init-from NEW_PLACE goes on with it"
Place = Callable[[Any], Any]  # a model of shapes -> the same with the places of its arrays


def absolute(name: str) -> str:
    """The same folder, wherever a command is given."""
    return name if is_remote(name) else str(Path(name).expanduser().absolute())


def find(flag: str, name: str, step: int | None, *, hashed: bool, say: Say) -> Record:
    """The weights of that folder: its last whole checkpoint, or the one at `step`; ConfigError.

    `hashed`: also where that means to read all files of a Hugging Face folder. Every process calls this.
    """
    folder = absolute(name)
    if not is_remote(name) and is_hub_folder(name):
        return {"folder": folder, "hub": True} | ({"sha256": from_leader(lambda: _hub_digest(name))} if hashed else {})
    check_model_folder(flag, name)
    if not exists(RunFolder(name).checkpoints, kind="directory"):  # asked first: opening a Store would make the folder
        raise ConfigError(f"{flag} {name}: holds no checkpoint; let the run reach its first save")
    with Store(name) as other:
        found: int | None = from_leader(lambda: chosen_step(RunFolder(name), other, say)) if step is None else step
        if found is None:
            raise ConfigError(f"{flag} {name}: its checkpoints folder holds no finished checkpoint")
        checkpoint = other.folder / str(found)
        if step is not None and (wrong := from_leader(lambda: manifest.problem(checkpoint))):
            raise ConfigError(f"{flag} {name}: its checkpoint {found} is damaged, {wrong}; choose another --init-step")
        averaged = any(entry.startswith("ema.") for entry in array_metadata(checkpoint))
        return {"folder": folder, "step": found, "averaged": averaged, "manifest": manifest.identity(checkpoint)}


def chosen_step(run: RunFolder, store: Store, say: Say) -> int | None:
    """The whole checkpoint that is taken where none is named: the last, or the best of a run that ends with it."""
    ends_with_best = False
    with contextlib.suppress(ConfigError):  # a lost run.json is no reason not to take the last one
        ends_with_best = run.config().ends_with_best
    if ends_with_best and (best := run.best_step()) is not None and best != run.steps()[-1]:
        if (wrong := manifest.problem(run.checkpoints / str(best))) is None:
            store.mark_verified(best)
            return best
        say(f"checkpoint {best}, the best: damaged, {wrong}; passed over")
    return store.latest_complete(say)


def read(record: Record, shape: Any, place: Place, say: Say, *, verified: bool = False) -> Any:
    """Return the model of a record in the shapes and dtypes of `shape`; ConfigError if it has changed since.

    Weight modules are restored as they are if the folder stores the same ones. Otherwise the model has plain arrays:
    those that the folder's modules compute with. `verified`: skip the check, `find` has just made the record. Every
    process calls this and gets its own devices' share.
    """
    name, like = record["folder"], place(bases(shape))
    if record.get("hub"):
        if not is_hub_folder(name):
            raise ConfigError(f"{name}: the model that this run's adapters belong to is not there; bring it back{_MOVED}")
        if not verified and "sha256" in record and from_leader(lambda: _hub_digest(name)) != record["sha256"]:
            raise ConfigError(
                f"{name}: is not the model that this run began with: its files have another hash; bring those "
                "back, or begin another run"
            )
        return read_weights(HubFolder(name), like, say)
    run, step = RunFolder(name), record["step"]
    if not verified:
        from_leader(lambda: _check_same(record, run))
    with Store(name) as store:
        store.mark_verified(step)
        cfg = run.config()
        if cfg.lora.rank:
            whole = merged(read_adapted(run, cfg, store, step, place, say))
        elif not has_derived(own := model_shape(cfg)):
            return store.restore_part(step, like, "ema", "model")
        else:
            sizes = lambda tree: [(name, leaf.shape) for name, leaf in named_leaves(tree).items()]
            alike = sizes(own) == sizes(shape) and count_by_storage(own) == count_by_storage(shape)
            found = store.restore_part(step, place(shape if alike else own), "ema", "model")
            if alike:
                return found
            whole = jax.jit(materialized)(found)
    return jax.tree.map(lambda a, b: jax.device_put(a.astype(b.dtype), b.sharding), whole, like)


def read_adapted(run: RunFolder, cfg: RunConfig, store: Store, step: int, place: Place, say: Say) -> Any:
    """The model of a run with adapters: these on top of its base, which is read from where it lies."""
    model = place(adapted_shape(cfg))
    adapters = store.restore_part(step, adapters_of(model), "ema", "model")
    return on_base(adapters, read(base_record(run, step), base_of(adapted_shape(cfg)), place, say))


def model_shape(cfg: RunConfig) -> Any:
    """Return the tree of the model of a run without adapters, with shapes for arrays."""
    return jax.eval_shape(lambda model: with_weight_modules(model, cfg.of_kits), abstract_model(cfg.model))


def adapted_shape(cfg: RunConfig) -> Any:
    """The model's tree with adapters, and shapes for arrays."""
    return jax.eval_shape(lambda model: adapted(model, cfg.lora, jax.random.key(0)), abstract_model(cfg.model))


def base_record(run: RunFolder, step: int) -> Record:
    """Where the base of a run's adapters lies: every checkpoint knows it, too."""
    known = run.description()
    record = (known and known.init_from) or manifest.read_values(run.checkpoints / str(step)).get("base")
    if not record:
        raise ConfigError(f"{run}: neither run.json nor checkpoint {step} says which model its adapters belong to")
    return record


def _check_same(record: Record, run: RunFolder) -> None:
    """ConfigError unless the checkpoint is there, whole, and the very same."""
    checkpoint = run.checkpoints / str(record["step"])
    if not exists(checkpoint, kind="directory"):
        raise ConfigError(
            f"{run}: checkpoint {record['step']}, the base of a run's adapters, is not there; bring it back "
            f"(a run keeps those that --keep-every names){_MOVED}"
        )
    if wrong := manifest.problem(checkpoint):
        raise ConfigError(f"{checkpoint}: the base of a run's adapters is damaged, {wrong}; bring it back from a copy")
    if manifest.identity(checkpoint) != record["manifest"]:
        raise ConfigError(
            f"{checkpoint}: is not what this run's adapters were trained on: it has another hash; bring that back, or begin "
            "another run"
        )


def _hub_digest(name: str) -> str:
    """Of all weights of a folder, whatever files they lie in, and of the configuration."""
    files = sorted({*Path(name).glob("*.safetensors"), Path(name) / CONFIG})
    return digest_of([[file.name, digest] for file, digest in zip(files, digests_of_files(files), strict=True)])
