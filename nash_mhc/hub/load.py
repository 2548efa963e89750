"""Load any model directory on one device or a mesh: a run, a Hugging Face folder, or a format of a kit.

A run may depend on the weights of another directory: its start, its teacher, or the base of its adapters. It does not
copy them. It records where they are and their hash, and reads them from there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store, array_metadata
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, DataConfig, LoraConfig, RunConfig, Section
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.hub.folder import CONFIG, RUN_COPY, HubFolder, is_hub_folder, read_weights
from nash_mhc.model.architectures import abstract_model, check_random_weights, with_weight_modules
from nash_mhc.model.lora import adapted, adapters_of, base_of, merged, on_base
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.weights import count_by_storage, has_derived, materialized, with_base_arrays
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.files import Folder, digest_of, digests_of_files, exists, is_remote
from nash_mhc.storage.folders import check_model_folder

log = logging.getLogger(__name__)
Record = dict[str, Any]  # in run.json: the location of the weights, and what identifies them
Place = Callable[[Any], Any]  # adds shardings to a model of ShapeDtypeStructs
_MOVED = "; if it has moved, use train RUN --init-from NEW_PLACE"


class ModelFormat(NamedTuple):
    """How to read a model directory that is not a run."""

    config: Callable[[Path], RunConfig]
    read: Callable[[Path, Any], Any]  # (folder, shapes with shardings) -> model
    check: Callable[[Path], object] = lambda path: None  # ConfigError if the weights do not match the configuration
    stops: Callable[[Path], Sequence[int]] = lambda path: ()  # end-of-text tokens, in addition to that of the tokenizer
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
FORMATS: Registry[ModelFormat] = Registry("formats", {CONFIG: _HUB, "adapter_config.json": "nash_mhc.hub.adapters:FORMAT"})


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
    dtype, stops = _compute_dtype(form.dtype or cfg.train.dtype), (tokenizer.end, *stop_tokens(str(folder)))
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
        copy = _hub_copy(RunFolder(folder))  # the original was moved or deleted
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
    if (form := format_of(folder)) is not None:
        return form.stops(Path(folder))
    copy = _hub_copy(RunFolder(folder))
    return HubFolder(copy).stop_tokens() if copy is not None else ()


def shape_of(folder: str, flag: str = "") -> tuple[RunConfig, Any]:
    """Return the configuration and the abstract model that `load` gives."""
    cfg = config_of(folder, flag)
    return cfg, model_shape(cfg.model, cfg.of_kits, cfg.lora)


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


# --- weights of other directories -------------------------------------------------------------------------------------


def absolute(name: str) -> str:
    return name if is_remote(name) else str(Path(name).expanduser().absolute())


def find_record(flag: str, name: str, step: int | None, *, hashed: bool) -> Record:
    """Return the record of a directory's weights: its latest complete checkpoint, or the one at `step`.

    `hashed`: also hash the files of a Hugging Face folder. Every process calls this.
    """
    folder = absolute(name)
    if not is_remote(name) and is_hub_folder(name):
        return {"folder": folder, "hub": True} | ({"sha256": from_leader(lambda: _hub_digest(name))} if hashed else {})
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
        if not is_hub_folder(name):
            raise ConfigError(f"{name}: the base model of this run's adapters is missing; restore it{_MOVED}")
        if not verified and "sha256" in record and from_leader(lambda: _hub_digest(name)) != record["sha256"]:
            raise ConfigError(f"{name}: sha256 differs from the model this run started from; restore it, or start a new run")
        return read_weights(HubFolder(name), like)
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


def _hub_digest(name: str) -> str:
    """Hash all weight files of a folder and its config.json."""
    files = sorted({*Path(name).glob("*.safetensors"), Path(name) / CONFIG})
    return digest_of([[file.name, digest] for file, digest in zip(files, digests_of_files(files), strict=True)])
