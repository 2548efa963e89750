"""Read the weights of other directories: a run's start, its teacher, or the base of its adapters.

A run does not copy them. It records where they are and their hash, and reads them from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, LoraConfig, Section
from nash_mhc.loading.formats import format_of, initial_format
from nash_mhc.model.architectures import abstract_model, with_weight_modules
from nash_mhc.model.lora import adapted, adapters_of, base_of, merged, on_base
from nash_mhc.model.weights import count_by_storage, has_derived, materialized, with_base_arrays
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.files import exists, is_remote
from nash_mhc.storage.folders import check_model_folder

log = logging.getLogger(__name__)
Record = dict[str, Any]  # in run.json: the location of the weights, and what identifies them
Place = Callable[[Any], Any]  # adds shardings to a model of ShapeDtypeStructs
_MOVED = "; if it has moved, use train RUN --init-from NEW_PLACE"


def on_devices(model: Any, mesh: Mesh | None) -> Any:
    """Add shardings to an abstract model: over the mesh as in training, or on this machine's first device."""
    if mesh is not None:
        return with_shardings(model, mesh)
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), model)


def absolute(name: str) -> str:
    return name if is_remote(name) else str(Path(name).expanduser().absolute())


def find_record(flag: str, name: str, step: int | None, *, hashed: bool) -> Record:
    """Return the record of a directory's weights: its latest complete checkpoint, or the one at `step`.

    `hashed`: also hash the files of a folder that is not a run. Every process calls this.
    """
    folder, form = absolute(name), initial_format(flag, name)
    if form is not None:
        sha256 = {"sha256": from_leader(lambda: form.identity(Path(name)))} if hashed else {}
        return {"folder": folder, "hub": True} | sha256
    check_model_folder(flag, name)
    if not exists(RunFolder(name).checkpoints, kind="directory"):  # first: Store would create it
        raise ConfigError(f"{flag} {name}: has no checkpoint; wait until the run has saved one")
    with Store(name) as store:
        chosen: int | None = from_leader(lambda: default_step(RunFolder(name), store)) if step is None else step
        if chosen is None:
            raise ConfigError(f"{flag} {name}: has no complete checkpoint; wait until the run has saved one")
        checkpoint = store.folder / str(chosen)
        if step is not None and (problem := from_leader(lambda: manifest.problem(checkpoint))):
            raise ConfigError(f"{flag} {name}: checkpoint {chosen} is damaged ({problem}); choose another --init-step")
        averaged = any(entry.startswith("ema.") for entry in array_metadata(checkpoint))
        return {"folder": folder, "step": chosen, "averaged": averaged, "manifest": manifest.identity(checkpoint)}


def default_step(run: RunFolder, store: Store) -> int | None:
    """Return the latest complete checkpoint, or the best one if the run's configuration ends with it."""
    ends_with_best = False
    with contextlib.suppress(ConfigError):  # a damaged run.json does not prevent reading the checkpoint
        ends_with_best = run.config().ends_with_best
    if ends_with_best and (best := run.best_step()) is not None and best != run.steps()[-1]:
        if (problem := manifest.problem(run.checkpoints / str(best))) is None:
            store.verified.add(best)
            return best
        log.warning(f"skipping the best checkpoint, {best}, because it is damaged ({problem})")
    return store.latest_complete()


def read_record(record: Record, shape: Any, place: Place, *, verified: bool = False) -> Any:
    """Load recorded weights in the shapes and dtypes of `shape`; raise ConfigError if they have changed since.

    Weight modules (such as quantized weights) are restored if the directory stores the same ones. Otherwise the model
    has plain arrays: those that the directory's modules compute with. `verified`: skip the check of the hash.
    Every process calls this and gets what its own devices hold.
    """
    name, like = record["folder"], place(with_base_arrays(shape))
    if record.get("hub"):
        form, path = format_of(name), Path(name)
        if form is None:
            raise ConfigError(f"{name}: the base model of this run's adapters is missing; restore it{_MOVED}")
        if not verified and "sha256" in record and from_leader(lambda: form.identity(path)) != record["sha256"]:
            raise ConfigError(
                f"{name}: sha256 differs from that of the model this run started from; restore it, or start a new run"
            )
        return form.read(path, like)
    run, step = RunFolder(name), record["step"]
    if not verified:
        from_leader(lambda: _check_unchanged(record, run))
    with Store(name) as store:
        store.verified.add(step)
        cfg = run.config()
        own = model_shape(cfg.model, cfg.of_kits, cfg.lora)
        if cfg.lora.rank:
            whole = merged(read_adapted(run, own, store, step, place))
        elif not has_derived(own):
            return store.restore_part(step, like, "ema", "model")
        else:
            sizes = lambda tree: [(name, leaf.shape) for name, leaf in named_leaves(tree).items()]
            alike = sizes(own) == sizes(shape) and count_by_storage(own) == count_by_storage(shape)
            found = store.restore_part(step, place(shape if alike else own), "ema", "model")
            if alike:
                return found
            whole = jax.jit(materialized)(found)
    return jax.tree.map(lambda a, b: jax.device_put(a.astype(b.dtype), b.sharding), whole, like)


def read_adapted(run: RunFolder, shape: Any, store: Store, step: int, place: Place) -> Any:
    """Load the model of a run with adapters: the adapters from its checkpoint, on the recorded base."""
    adapters = store.restore_part(step, adapters_of(place(shape)), "ema", "model")
    return on_base(adapters, read_record(base_record(run, step), base_of(shape), place))


def model_shape(cfg: ArchitectureConfig, sections: Iterable[Section] = (), lora: LoraConfig = LoraConfig()) -> Any:
    """Return the abstract model with the weight modules of kit sections and with adapters."""
    complete = lambda model: adapted(with_weight_modules(model, sections), lora, jax.random.key(0))
    return jax.eval_shape(complete, abstract_model(cfg))


def base_record(run: RunFolder, step: int) -> Record:
    """Return the record of the base of a run's adapters, from run.json or the checkpoint."""
    known = run.description()
    record = (known and known.init_from) or manifest.read_values(run.checkpoints / str(step)).get("base")
    if not record:
        raise ConfigError(f"{run}: neither run.json nor checkpoint {step} names the base model of the adapters")
    return record


def _check_unchanged(record: Record, run: RunFolder) -> None:
    checkpoint = run.checkpoints / str(record["step"])
    if not exists(checkpoint, kind="directory"):
        raise ConfigError(
            f"{run}: checkpoint {record['step']}, the base of a run's adapters, is missing; restore this checkpoint "
            f"(--keep-every protects checkpoints){_MOVED}"
        )
    if problem := manifest.problem(checkpoint):
        raise ConfigError(f"{checkpoint}: the base of a run's adapters is damaged ({problem}); restore it from a copy")
    if manifest.identity(checkpoint) != record["manifest"]:
        raise ConfigError(
            f"{checkpoint}: its hash differs from the base that the adapters were trained on; restore it, or start a new run"
        )
