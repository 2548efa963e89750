"""What a run reads and where it writes, opened and checked:
whatever must be refused is refused here, and leaves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import RunFolder, make_run_folder
from nash_mhc.checkpoint.run_lock import Owner, acquire, acquire_shared, check_visible
from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import ConfigError, DataConfig, RunConfig, TrainConfig
from nash_mhc.data.mixture import RowSource
from nash_mhc.data.sources import loss_floor, open_held_out, open_source, open_test
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.hub.folder import is_hub_folder
from nash_mhc.objectives.base import Batch
from nash_mhc.objectives.registry import TEXT, named_objective
from nash_mhc.parallel.board import from_leader, leader_first
from nash_mhc.parallel.processes import check_same
from nash_mhc.parallel.sharding import RULES
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import exists, is_remote
from nash_mhc.telemetry.sinks import check_wandb
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.resume import check_resume
from nash_mhc.train.teacher import Teachers, check_drawn

Say = Callable[[str], None]


@dataclass(frozen=True)
class Inputs:
    cfg: RunConfig  # knows its folder
    folder: RunFolder
    owner: Owner  # this run, for as long as it lasts
    tokenizer: Tokenizer
    source: RowSource
    evaluator: Evaluator | None  # None: no text is held out
    test: Evaluator | None  # on text that not even the choice of a checkpoint has seen; None: there is none
    teachers: Teachers  # that read every batch
    floor: tuple[float, float] | None  # nats a token, bits a byte; None where the data does not know it

    @property
    def identity(self) -> str:
        """Of all that the run reads."""
        return self.teachers.identity(self.source)

    @property
    def rows_a_step(self) -> int:
        return self.cfg.data.batch_size * self.cfg.train.grad_accum

    def summary(self, mesh: Mesh) -> list[str]:
        """Describe the data and the batch, a line each."""
        data, parts = self.cfg.data, self.cfg.train.grad_accum
        began = self.cfg.train.init_from or self.cfg.train.resume_from
        sequences, devices = self.rows_a_step, math.prod(mesh.shape[axis] for axis in RULES["batch"])
        step = f"{counted(sequences, 'sequence')}/step of {data.seq_len:,} tokens, {sequences * data.seq_len:,} tokens/step"
        split = f"{counted(parts, 'microbatch', 'microbatches')}, {counted(data.batch_size // devices, 'sequence')} per device"
        return [
            f"data: {_dataset(data, began)}; tokenizer {data.tokenizer}, {self.tokenizer.vocab_size:,} tokens",
            f"batch: {step}; {split}{' in each' if parts > 1 else ''}",
        ]

    def abstract_batch(self, source: RowSource, parts: int, mesh: Mesh) -> Batch:
        """Return shapes of the batches of a source, to compile programs before the data is there."""
        batch = abstract_batch(self.cfg.data, parts, mesh, getattr(source, "extras", {}))
        return self.teachers.abstract(source, batch)


def open_inputs(cfg: RunConfig, mesh: Mesh, watch: Watch, held: contextlib.ExitStack, say: Say) -> Inputs:
    """ConfigError for what does not fit. The run's folder is given back when `held` closes."""
    own = None if cfg.train.checkpoint_dir is None else RunFolder(cfg.train.checkpoint_dir)
    owner: Owner | None = None
    if own is not None and from_leader(lambda: _is_there(own)):
        owner = _hold(own, watch, held, say, wait=cfg.train.wait_for_lock)
    watch.set_phase("preparing the data")
    tokenizer = _tokenizer(cfg.data, cfg.model.vocab_size, own, cfg.train)
    floor = loss_floor(cfg.data, tokenizer)
    align = cfg.model.alignment
    how: dict[str, Any] = {"align": align, "temperature": cfg.distill.temperature if cfg.reads_cache else None}
    source = leader_first(lambda: open_source(cfg.data, tokenizer, split=cfg.data.split, seed=cfg.train.seed, **how))
    takes, has = named_objective(cfg).examples, getattr(source, "examples", TEXT)
    if takes not in (None, has):
        raise ConfigError(
            f"--objective {cfg.objective.name} does not go with --dataset {cfg.data.dataset}: it takes {takes}, the dataset "
            f"has {has}; choose another of the two"
        )
    cfg = _with_steps_of(cfg, source)
    if cfg.reads_cache:  # which says itself how many of its tokens were drawn
        without = "make the cache again without --random"
        check_drawn(f"--dataset {cfg.data.dataset}", source.random, source.drawn_from, cfg, without=without)  # type: ignore[attr-defined]
        cfg = dataclasses.replace(cfg, distill=dataclasses.replace(cfg.distill, random=source.random))  # type: ignore[attr-defined]
    teachers = Teachers(cfg, tokenizer, mesh, say)
    identity = teachers.identity(source)
    if jax.process_count() > 1:
        check_same({f"the data of --dataset {cfg.data.dataset}": identity}, patience=math.inf)  # it may take long to open
    from_leader(lambda: check_resume(cfg, rows=identity))
    from_leader(lambda: check_wandb(cfg.telemetry))
    held_out = leader_first(lambda: open_held_out(cfg.data, tokenizer, **how))
    evaluator = None if held_out is None else Evaluator(cfg, held_out, tokenizer, mesh, teach=teachers.reader(held_out))
    tested = leader_first(lambda: open_test(cfg.data, tokenizer, **how))
    test = None if tested is None else Evaluator(cfg, tested, tokenizer, mesh, teach=teachers.reader(tested), all_rows=True)
    # Last of the checks: what is refused leaves nothing behind.
    folder = RunFolder(from_leader(lambda: str(make_run_folder(cfg.train.checkpoint_dir, cfg.model_size))))
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, checkpoint_dir=str(folder)))
    if owner is None:
        owner = _hold(folder, watch, held, say, wait=cfg.train.wait_for_lock)
        from_leader(lambda: check_resume(cfg, rows=identity))  # another run may have begun, and ended, there meanwhile
    return Inputs(cfg, folder, owner, tokenizer, source, evaluator, test, teachers, floor)


def _dataset(cfg: DataConfig, began: str | None) -> str:
    """Describe the dataset, and say where it comes from if the user named none; `began`: where the run starts from."""
    name = cfg.dataset + (f", {cfg.dataset_name}" if cfg.dataset_name else "")
    if began is not None and (is_remote(began) or not is_hub_folder(began)):
        before = RunFolder(began)
        described = None if before.is_imported() else before.description()
        if described is not None and described.config.get("data.dataset") == cfg.dataset:
            return f"{name}, as in {began}"
    return f"{name} (built in; --dataset names others)" if cfg.dataset == "stories" else name


def _with_steps_of(cfg: RunConfig, source: RowSource) -> RunConfig:
    """--epochs as steps of this source; ConfigError where nobody knows how long a pass is."""
    if cfg.train.epochs is None:
        return cfg
    if source.endless or not source.epochs(1):
        raise ConfigError(
            f"--epochs {cfg.train.epochs:g}: {cfg.data.dataset} has no end that is known; give --total-steps instead"
        )
    steps = math.ceil(cfg.train.epochs * len(source) / (cfg.data.batch_size * cfg.train.grad_accum))
    if cfg.optim.warmup_steps > steps:
        raise ConfigError(
            f"--epochs {cfg.train.epochs:g}: that is {steps} steps of {cfg.data.batch_size * cfg.train.grad_accum} rows, fewer "
            f"than the --warmup-steps {cfg.optim.warmup_steps}; lower --warmup-steps or --batch-size"
        )
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, total_steps=steps))


def _is_there(folder: RunFolder) -> bool:
    with as_config_error(f"--checkpoint-dir {folder}"):
        return exists(folder.path, kind="directory")


def _hold(folder: RunFolder, watch: Watch, held: contextlib.ExitStack, say: Say, *, wait: float) -> Owner:
    """Lock the folder for this run; its other processes follow once the first one holds it."""

    def take() -> Owner:
        watch.set_phase(f"waiting for {folder}")
        with as_config_error(f"--checkpoint-dir {folder}"):
            if jax.process_index() == 0:
                return acquire(folder.path, wait=wait, say=say)
            check_visible(folder.path)
            return acquire_shared(folder.path)

    owner = leader_first(take)
    held.callback(owner.release)
    return owner


def _tokenizer(cfg: DataConfig, vocab_size: int, own: RunFolder | None, train: TrainConfig) -> Tokenizer:
    """Load the tokenizer; ConfigError if it has more tokens than the model."""
    tokenizer = load_tokenizer(cfg.tokenizer, begin_with_end=cfg.begin_with_end)
    if tokenizer.vocab_size > vocab_size:
        begun = own if own is not None and own.description() is not None else None
        sources = {"the run in": begun, "--init-from": train.init_from, "--resume-from": train.resume_from}
        given = [f"{what} {folder}" for what, folder in sources.items() if folder is not None]  # such a model keeps its size
        remedy = f"use the tokenizer of {given[0]}" if given else f"set --model-vocab-size {tokenizer.vocab_size}"
        raise ConfigError(
            f"--tokenizer {cfg.tokenizer} has {tokenizer.vocab_size} tokens, the model only {vocab_size}; {remedy}"
        )
    return tokenizer
