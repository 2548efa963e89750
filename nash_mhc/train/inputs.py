"""The inputs of a run: processes, devices, data and run directory, opened and checked before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import nash_mhc
from nash_mhc.checkpoint.run_folder import RunFolder, make_run_folder
from nash_mhc.checkpoint.run_lock import Owner, acquire, acquire_shared, check_visible
from nash_mhc.config import keys
from nash_mhc.config.fields import weighted_parts
from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import ConfigError, DataConfig, RunConfig, TrainConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.data.prepared.folder import FILE
from nash_mhc.data.sources import loss_floor, open_held_out, open_source, open_test
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.estimate.candidates import fastest_remat, with_remat
from nash_mhc.estimate.preflight import device_capacity
from nash_mhc.loading.formats import format_of
from nash_mhc.model.architectures import for_platform
from nash_mhc.objectives.base import Batch, OpenFeed
from nash_mhc.objectives.registry import feed_of, named_objective
from nash_mhc.parallel.board import barrier, check_settings_agree, from_leader, leader_first
from nash_mhc.parallel.mesh import check_fit, indivisible_sizes, make_mesh
from nash_mhc.parallel.processes import start
from nash_mhc.parallel.sharding import RULES
from nash_mhc.runtime.profile import disable_command_buffers
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import digest_of, digest_of_file, is_remote
from nash_mhc.telemetry.sinks import check_wandb
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.resume import check_resume
from nash_mhc.train.state import ProgramKey, abstract_state
from nash_mhc.train.step import make_objective

# Settings that may differ between processes, or that only process 0 uses.
_PER_PROCESS = {
    "mesh.coordinator_address", "mesh.num_processes", "mesh.process_id", "mesh.connect_timeout", "telemetry.log_format",
    "telemetry.log_level", "train.wait_for_lock",
}  # fmt: skip
_SAMPLED_BYTES = 2**20  # read at the beginning and at the end of a file, to compare it between processes


# --- processes and devices -------------------------------------------------------------------------------------------


def join(cfg: RunConfig, **flags: Any) -> None:
    """Join the other processes of the run, if there are any; call this before a device is used.

    Raise ConfigError in every process if their settings, or these other `flags`, differ.
    """
    if cfg.telemetry.profiled is not None:
        disable_command_buffers()
    if start(cfg.mesh) > 1:
        check_settings_agree(settings_of_run(cfg) | {f"--{name.replace('_', '-')}": value for name, value in flags.items()})


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Start the devices and resolve the settings that depend on them; raise ConfigError if they do not fit."""
    mesh = make_mesh(cfg.mesh, lambda shape: not indivisible_sizes(cfg.data, cfg.model, shape))
    check_fit(cfg.data, cfg.model, mesh.shape, resizable=cfg.resizable)
    platform = mesh.devices.flat[0].platform
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **mesh.shape))
    cfg = for_platform(cfg, platform)
    make_objective(cfg)  # raises for an unknown objective
    abstract_state(cfg)  # raises for an unknown optimizer, and for --freeze and --train-only that match no parameter
    if cfg.train.remat == "auto":
        cfg = with_remat(cfg, fastest_remat(cfg, mesh.shape, device_capacity(mesh)))
    return cfg, mesh


def with_remat_of_leader(cfg: RunConfig) -> RunConfig:
    """Return a resolved run with the remat of process 0: estimates may differ between machines."""
    return with_remat(cfg, from_leader(lambda: (cfg.train.remat, cfg.train.remat_keep)))


def settings_of_run(cfg: RunConfig) -> dict[str, Any]:
    """Return the values that all processes must share: settings by flag, versions, and digests of the code and data."""
    values = cfg.to_dict()
    common: dict[str, Any] = {"--model-kind": cfg.model_kind}
    common |= {key.flag: key.of(values) for path, key in keys.keys(cfg.model_kind).items() if path not in _PER_PROCESS}
    common |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    common["nash_mhc"] = f"{nash_mhc.__version__} (its files {_code_digest()})"
    names = [name for name, _ in weighted_parts(cfg.data.dataset)] or [cfg.data.dataset]
    return common | {f"the files of {name}": _data_digest(name) for name in [*names, cfg.data.tokenizer]}


def _code_digest() -> str:
    """Return a digest of the package's files: two checkouts may have the same version."""
    root = Path(nash_mhc.__file__).parent
    return digest_of([[str(file.relative_to(root)), digest_of_file(file)] for file in sorted(root.rglob("*.py"))])[:8]


def _data_digest(name: str) -> str | None:
    """Return a digest of the files under this name, from their sizes and ends; None if there are none here."""
    if is_remote(name):
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        manifest = path / FILE
        if manifest.exists():
            return digest_of_file(manifest)[:16]
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = sorted(Path(file) for file in glob.glob(str(path), recursive=True))
    return digest_of([_file_digest(file) for file in files])[:16] if files else None


def _file_digest(file: Path) -> list[Any]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_SAMPLED_BYTES)
        opened.seek(max(0, size - _SAMPLED_BYTES))
        return [file.name, size, hashlib.sha256(first + opened.read()).hexdigest()]


# --- data and run directory ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    cfg: RunConfig  # with its run directory and number of steps
    folder: RunFolder
    owner: Owner  # the lock of the run directory
    tokenizer: Tokenizer
    source: RowSource
    evaluator: Evaluator | None  # on held-out data; None if there is none
    test: Evaluator | None  # on the test split, which is not used to choose a checkpoint; None if there is none
    feed: OpenFeed  # adds fields to batches
    floor: tuple[float, float] | None  # lowest possible loss: nats/token, bits/byte; None if unknown

    @property
    def identity(self) -> str:
        """Return a digest of all that the run reads."""
        return self.feed.identity(self.source)

    @property
    def sequences_per_step(self) -> int:
        return self.cfg.data.batch_size * self.cfg.train.grad_accum

    def summary(self, mesh: Mesh) -> list[str]:
        """Describe the data and the batch, in a line each."""
        data, accum = self.cfg.data, self.cfg.train.grad_accum
        start = self.cfg.train.init_from or self.cfg.train.resume_from
        sequences, devices = self.sequences_per_step, math.prod(mesh.shape[axis] for axis in RULES["batch"])
        step = f"{counted(sequences, 'sequence')}/step of {data.seq_len:,} tokens, {sequences * data.seq_len:,} tokens/step"
        split = f"{counted(accum, 'microbatch', 'microbatches')}, {counted(data.batch_size // devices, 'sequence')} per device"
        return [
            f"data: {_describe_dataset(data, start)}; tokenizer {data.tokenizer}, {self.tokenizer.vocab_size:,} tokens",
            f"batch: {step}; {split}{' in each' if accum > 1 else ''}",
        ]

    def abstract_batch(self, source: RowSource, accum: int, mesh: Mesh) -> Batch:
        """Return the shapes of the batches of a source, to compile programs before data is read."""
        batch = abstract_batch(self.cfg.data, accum, mesh, source.extras)
        return self.feed.abstract(source, batch)


def open_inputs(cfg: RunConfig, mesh: Mesh, watch: Watch, stack: contextlib.ExitStack) -> Inputs:
    """Open the data and lock the run directory until `stack` closes; raise ConfigError for settings that do not fit."""
    existing = None if cfg.train.checkpoint_dir is None else RunFolder(cfg.train.checkpoint_dir)
    owner: Owner | None = None
    if existing is not None and from_leader(existing.exists):
        owner = _lock(existing, watch, stack, wait=cfg.train.wait_for_lock)
    watch.set_phase("preparing the data")
    tokenizer = _tokenizer(cfg.data, cfg.model.vocab_size, existing, cfg.train)
    floor = loss_floor(cfg.data, tokenizer)
    options: dict[str, Any] = {"align": cfg.model.alignment, "opener": feed_of(cfg.objective.name).opener(cfg)}
    source = leader_first(lambda: open_source(cfg.data, tokenizer, split=cfg.data.split, seed=cfg.train.seed, **options))
    takes, has = named_objective(cfg.objective.name).examples, source.examples
    if takes not in (None, has):
        raise ConfigError(
            f"--objective {cfg.objective.name} needs {takes} examples, but --dataset {cfg.data.dataset} has {has}; choose "
            "another objective or dataset"
        )
    if cfg.train.epochs is not None:
        steps = _steps_of_epochs(cfg.train.epochs, cfg.data.batch_size * cfg.train.grad_accum, source, cfg.optim.warmup_steps)
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, total_steps=steps))
    cfg, feed = feed_of(cfg.objective.name).open(cfg, source, tokenizer, mesh)
    identity = feed.identity(source)
    if jax.process_count() > 1:
        check_settings_agree(
            {f"the data of --dataset {cfg.data.dataset}": identity}, timeout=math.inf
        )  # opening data may take long
    from_leader(lambda: check_resume(cfg, rows=identity, other_data=feed.described))
    from_leader(lambda: check_wandb(cfg.telemetry))

    def evaluator(source: RowSource | None, *, all_rows: bool = False) -> Evaluator | None:
        if source is None:
            return None
        return Evaluator(
            ProgramKey.of(cfg), source, tokenizer, mesh, batch_size=cfg.data.batch_size, batches=cfg.train.eval_batches,
            feed=feed, all_rows=all_rows,
        )  # fmt: skip

    held_out = evaluator(leader_first(lambda: open_held_out(cfg.data, tokenizer, **options)))
    test = evaluator(leader_first(lambda: open_test(cfg.data, tokenizer, **options)), all_rows=True)
    # After the other checks, so that a rejected run leaves no directory.
    folder = RunFolder(from_leader(lambda: str(make_run_folder(cfg.train.checkpoint_dir, cfg.model_size))))
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, checkpoint_dir=str(folder)))
    if owner is None:
        owner = _lock(folder, watch, stack, wait=cfg.train.wait_for_lock)
        # Another run may have used the directory meanwhile.
        from_leader(lambda: check_resume(cfg, rows=identity, other_data=feed.described))
    return Inputs(cfg, folder, owner, tokenizer, source, held_out, test, feed, floor)


def _describe_dataset(cfg: DataConfig, start: str | None) -> str:
    """Name the dataset, and its origin if the user gave none; `start` is the run or model to start from."""
    name = cfg.dataset + (f", {cfg.dataset_name}" if cfg.dataset_name else "")
    if start is not None and format_of(start) is None:
        before = RunFolder(start)
        described = None if before.is_imported() else before.description()
        if described is not None and described.config.get("data.dataset") == cfg.dataset:
            return f"{name}, as in {start}"
    return f"{name} (built in; use --dataset to choose another)" if cfg.dataset == "stories" else name


def _steps_of_epochs(epochs: float, sequences_per_step: int, source: RowSource, warmup_steps: int) -> int:
    """Return --epochs as steps; raise ConfigError for a source of unknown length."""
    if source.endless or not source.epochs(1):
        raise ConfigError(f"--epochs {epochs:g}: {source.name} has no known end; give --total-steps instead")
    steps = math.ceil(epochs * len(source) / sequences_per_step)
    if warmup_steps > steps:
        raise ConfigError(
            f"--epochs {epochs:g} is {steps} steps of {sequences_per_step} sequences, fewer than --warmup-steps "
            f"{warmup_steps}; lower --warmup-steps or --batch-size"
        )
    return steps


def _lock(folder: RunFolder, watch: Watch, stack: contextlib.ExitStack, *, wait: float) -> Owner:
    """Lock the directory for this run: process 0 takes the lock, then the other processes join it."""

    def acquire_lock() -> Owner:
        watch.set_phase(f"waiting for {folder}")
        with as_config_error(f"--checkpoint-dir {folder}"):
            if jax.process_index() == 0:
                return acquire(folder.path, wait=wait)
            check_visible(folder.path)
            return acquire_shared(folder.path)

    owner = leader_first(acquire_lock)
    stack.callback(owner.release)
    barrier()  # otherwise process 0 would start a step, and its wait for the others would count as a stall
    return owner


def _tokenizer(cfg: DataConfig, vocab_size: int, existing: RunFolder | None, train: TrainConfig) -> Tokenizer:
    """Load the tokenizer; raise ConfigError if it has more tokens than the model."""
    tokenizer = load_tokenizer(cfg.tokenizer, begin_with_end=cfg.begin_with_end)
    if tokenizer.vocab_size > vocab_size:
        begun = existing if existing is not None and existing.description() is not None else None
        # A model that was trained before keeps its vocabulary.
        origins = {"the run in": begun, "--init-from": train.init_from, "--resume-from": train.resume_from}
        given = [f"{what} {folder}" for what, folder in origins.items() if folder is not None]
        remedy = f"use the tokenizer of {given[0]}" if given else f"set --model-vocab-size {tokenizer.vocab_size}"
        raise ConfigError(
            f"--tokenizer {cfg.tokenizer} has {tokenizer.vocab_size} tokens, but the model has only {vocab_size}; {remedy}"
        )
    return tokenizer
