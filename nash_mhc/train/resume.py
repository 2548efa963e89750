"""How a run starts: from its own latest complete checkpoint, another run's, pretrained weights, or fresh ones."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import Description, RunFolder, flatten_config
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.keys import key_of_any_kind
from nash_mhc.config.schema import (
    KIT_SECTIONS,
    ArchitectureConfig,
    ConfigError,
    RunConfig,
    TrainConfig,
)
from nash_mhc.data.sources import RowSource
from nash_mhc.loading.formats import initial_format
from nash_mhc.loading.weights import absolute, base_record, find_record, read_record
from nash_mhc.model.architectures import abstract_model, architecture_of, check_random_weights
from nash_mhc.model.lora import base_of, on_base
from nash_mhc.objectives.registry import carries
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import exists, is_remote
from nash_mhc.telemetry.sinks import without_nan
from nash_mhc.train.state import TrainState, abstract_state, create_state, saved_part, sharded_abstract_state

log = logging.getLogger(__name__)

# Settings that determine the sequences of each step, so a resumed run must keep them.
_SAME_DATA = (
    "data.dataset", "data.dataset_name", "data.split", "data.tokenizer", "data.seq_len", "data.text_field", "data.format",
    "data.template", "data.prompt_template", "data.response_template", "data.loss_on", "data.max_documents",
    "data.validation_fraction", "data.test_fraction", "data.test_split", "data.streaming", "train.seed",
)  # fmt: skip
# Keys of the model that change no shape, so a run may change them when it starts from a model folder.
_MAY_DIFFER = ("window", "full_every", "rope_theta", "rope_scaling", "norm_eps")
_SEQUENCES = "batch-size x grad-accum"  # sequences per step


# --- checks before anything is written -------------------------------------------------------------------------------


def check_resume(cfg: RunConfig, *, rows: str, other_data: str = "") -> None:
    """Raise ConfigError unless the run fits what it would resume or start from.

    rows: identifies the data. other_data: flags other than --dataset that the data depends on, for the message.
    """
    resume, directory, settings = cfg.train.resume, cfg.train.checkpoint_dir, flatten_config(cfg.to_dict())
    own = RunFolder(directory) if directory else None
    with as_config_error(f"--checkpoint-dir {directory}"):
        if own and own.is_imported():
            raise ConfigError(
                f"--checkpoint-dir {directory} holds an imported model, not a run; start a run from it with "
                f"--init-from {directory} and another --checkpoint-dir"
            )
        steps = own.finished() if own else []
        if own and not steps and not own.set_aside():
            _check_nothing_is_lost(own)
    if resume == "never" and steps:
        raise ConfigError(
            f"--resume never: {directory} holds checkpoints up to step {steps[-1]}; choose another --checkpoint-dir"
        )
    if resume == "must" and not steps and cfg.train.resume_from is None:
        where = f"{directory} contains no checkpoint" if directory else "no --checkpoint-dir is given"
        raise ConfigError(f"--resume must: {where}; give the --checkpoint-dir of a run that has one")
    if not steps:  # otherwise the run resumes from its own checkpoint
        if cfg.train.resume_from is not None:
            _check_same_run(other_run("--resume-from", cfg.train.resume_from), settings, cfg.model, rows=None)
        if cfg.train.init_from is not None:
            _check_weights(cfg.model, cfg.train.init_from, cfg.train.init_step)
        elif cfg.lora.rank and cfg.train.resume_from is None:
            raise ConfigError(
                "--lora-rank needs a pretrained model; give a run directory or Hugging Face model with --init-from"
            )
    elif own and cfg.train.init_from is not None and not cfg.lora.rank:
        _check_same_init(own, cfg.train.init_from)
    if own and own.has_checkpoint():  # without a checkpoint, any shape and batch size fit
        _check_same_run(own, settings, cfg.model, rows=rows, other_data=other_data)


def _check_nothing_is_lost(folder: RunFolder) -> None:
    """Raise ConfigError if metrics.jsonl has rows but the checkpoints are gone: a fresh start would erase the rows."""
    last = folder.last_row()
    if last and (folder.missing(()) or last.get("last_checkpoint") is not None):
        saved = f" (latest: step {last['last_checkpoint']})" if last.get("last_checkpoint") is not None else ""
        raise ConfigError(
            f"{folder}: metrics.jsonl has rows up to step {last.get('step')}, but the checkpoints are missing{saved}; "
            "restore them, or choose another --checkpoint-dir; the directory was not changed"
        )


def _with_sequences(values: dict[str, Any]) -> dict[str, Any]:
    return values | {_SEQUENCES: values["data.batch_size"] * values["train.grad_accum"]}


# Keys that older runs do not record, and what those runs did.
_ADDED = {"optim.optimizer": "adamw", "model.ffn_kind": "swiglu", "model.value_embeddings": 0}


def _check_same_run(
    folder: RunFolder, now: dict[str, Any], model: ArchitectureConfig, *, rows: str | None, other_data: str = ""
) -> None:
    """Raise ConfigError unless the run in `folder` has the same model and, if `rows` is given, the same data.

    `now` are the settings of this run by path.
    """
    if (described := folder.description()) is None:
        return
    before, now = _with_sequences(described.config), _with_sequences(now)
    if before["model_kind"] != now["model_kind"]:
        raise ConfigError(
            f"{folder} holds another run: its --model-kind is {before['model_kind']}, but this command has "
            f"{now['model_kind']}; use {before['model_kind']}, or choose another --checkpoint-dir"
        )
    before = _ADDED | before
    same = [k for k in now if k.startswith("model.")]
    if bool(before.get("optim.ema_decay")) != bool(now["optim.ema_decay"]):  # the state has averaged weights or not
        same.append("optim.ema_decay")
    same += ["optim.optimizer", "optim.freeze", "optim.train_only"]  # they determine which moments the state has
    if before.get("lora.rank") or now["lora.rank"]:  # dropout may change
        same += [f"lora.{name}" for name in ("rank", "alpha", "targets", "rslora", "base_dtype")]
    for name, kind in KIT_SECTIONS.items():
        if kind.switch and (before.get(f"{name}.{kind.switch}") or now[f"{name}.{kind.switch}"]):
            same += [k for k in now if k.startswith(f"{name}.")]
    if carries(now["objective.name"]):  # the carry has the shape of a batch
        same += ["objective.name", "data.batch_size", "train.grad_accum"]
    if rows is not None:
        same += [k for k in (*_SAME_DATA, _SEQUENCES) if k in before]
    if changed := [f"{k} ({before.get(k)} in that run, {now[k]} in this command)" for k in same if before.get(k) != now[k]]:
        remedy = _how_to_restore(before, now, changed)
        raise ConfigError(f"{folder} holds another run: {', '.join(changed)}; {remedy}, or choose another --checkpoint-dir")
    check_random_weights(model, described.drawn, str(folder))
    if rows is not None and described.rows != rows:
        data = " or ".join(filter(None, [f"--dataset {now['data.dataset']}", other_data]))
        raise ConfigError(
            f"{folder}: the data of {data} has changed since this run began; "
            f"restore it, or start another run from its weights with --init-from {folder} and a new --checkpoint-dir"
        )


def _how_to_restore(before: dict[str, Any], now: dict[str, Any], changed: list[str]) -> str:
    """Return which flags restore the settings of the run."""
    if not any(text.startswith(_SEQUENCES) for text in changed):
        return "use the settings of that run"
    sequences, batch = before[_SEQUENCES], now["data.batch_size"]
    split = (batch, sequences // batch) if sequences % batch == 0 else (before["data.batch_size"], before["train.grad_accum"])
    keeps = f"--batch-size {split[0]} --grad-accum {split[1]} keeps {sequences} sequences per step"
    return keeps if len(changed) == 1 else f"use the settings of that run ({keeps})"


def _check_same_init(folder: RunFolder, init_from: str) -> None:
    """Raise ConfigError if the run in this directory did not start from the model of --init-from."""
    if (described := folder.description()) is None:
        return
    began = (described.init_from or {}).get("folder") or described.config.get("train.init_from")
    absolute = lambda name: name if is_remote(name) else str(Path(name).expanduser().absolute())
    if began is None or absolute(began) != absolute(init_from):
        raise ConfigError(
            f"--init-from {init_from}: {folder} holds a run that started from {began or 'fresh weights'}; choose another "
            "--checkpoint-dir, or leave out --init-from to resume that run"
        )


def _check_weights(model: ArchitectureConfig, name: str, step: int | None) -> None:
    """Raise ConfigError unless the weights that --init-from names fit this model."""
    if (form := initial_format("--init-from", name)) is None:
        folder = other_run("--init-from", name)
        steps = folder.steps()
        if not steps or (step is not None and step not in steps):
            flag, there = "" if step is None else f" --init-step {step}", ", ".join(map(str, steps)) or "none"
            raise ConfigError(f"--init-from {folder}{flag}: no such checkpoint; checkpoints of that run: {there}")
        _check_shapes(model, folder)
        return
    if step is not None:
        raise ConfigError(f"--init-step {step}: {name} is not a run and has no steps; leave out --init-step")
    theirs = form.config(Path(name)).model
    if type(model) is not type(theirs):
        raise ConfigError(f"--init-from {name}: this model cannot initialize --model-kind {model.architecture}")
    form.check(Path(name))
    for key, value in vars(model).items():
        if key not in _MAY_DIFFER and value != (expected := getattr(theirs, key)):
            raise ConfigError(f"model.{key} {value}: {name} has {expected}; omit it to use the value of that model")


def _check_shapes(model: ArchitectureConfig, folder: RunFolder) -> None:
    """Raise ConfigError if the parameters of the model and those in the directory differ in shape."""
    try:
        theirs = folder.config().model
    except ConfigError:
        return  # run.json is missing or from an incompatible version: reading the weights finds any difference
    if type(model) is not type(theirs) or _shapes(model) == _shapes(theirs):
        return
    was, now = vars(theirs), vars(model)
    changed = [name for name in now if now[name] != was[name]]
    # Name the keys that change the shapes on their own; if there is none, all that differ.
    alone = [name for name in changed if _shapes_differ(theirs, name, now[name])] or changed
    flags = [key_of_any_kind(f"model.{name}").flag for name in alone]
    raise ConfigError(
        f"--init-from {folder}: the weights of that run have other shapes: "
        + ", ".join(f"model.{name} ({was[name]} in that run, {now[name]} in this command)" for name in alone)
        + f"; leave out {' and '.join(flags)}, or train from fresh weights without --init-from"
    )


def _shapes(model: ArchitectureConfig) -> dict[str, Any]:
    return {name: array.shape for name, array in named_leaves(abstract_model(model)).items()}


def _shapes_differ(model: ArchitectureConfig, name: str, value: Any) -> bool:
    """Return whether this key alone changes the shapes of the model."""
    try:
        return _shapes(dataclasses.replace(model, **{name: value})) != _shapes(model)  # type: ignore[type-var]
    except ConfigError:
        return True


def other_run(flag: str, name: str) -> RunFolder:
    """Return the directory of another run; raise ConfigError if it has no checkpoints."""
    with as_config_error(f"{flag} {name}"):
        found = exists(RunFolder(name).checkpoints, kind="directory")
    if not found:
        raise ConfigError(f"{flag} {name}: not a run with checkpoints; give the --checkpoint-dir of an earlier run")
    return RunFolder(name)


# --- the state that a run starts from --------------------------------------------------------------------------------


def checkpoint_values(
    config: dict[str, Any],
    step: int,
    *,
    rows: str,
    counts: dict[str, Any],
    metrics: dict[str, Any],
    evaluation: dict[str, float] | None,
    base: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the values of a checkpoint that are not arrays.

    `metrics` are those of the step itself, `counts` is what the meter resumes from, `rows` identifies the data, and
    `base` names the model that the arrays are adapters of.
    """
    data, train = config["data"], config["train"]
    return {
        "step": step,
        "config": config,
        **counts,
        # The seed determines the order of the sequences, so this count determines the next ones.
        "data": {"rows_read": step * data["batch_size"] * train["grad_accum"], "rows": rows},
        # These two determine all random numbers of a run: there is no generator state to save.
        "rng": {"seed": train["seed"], "step": step},
        "metrics": {k: without_nan(v.tolist()) for k, v in metrics.items()},
        "evaluation": evaluation,
    } | ({} if base is None else {"base": base})


class Start(NamedTuple):
    """The state that a run starts from, and its origin."""

    state: TrainState
    step: int  # steps done
    values: dict[str, Any]  # the other values of its checkpoint
    origin: str  # a description for the terminal
    own: bool = False  # whether this run saved it
    before: Description | None = None  # run.json of the run that it continues
    init_from: dict[str, Any] | None = None  # the pretrained weights that the run began with

    def evaluation_missing(self, train: TrainConfig) -> bool:
        """Return whether the run stopped during the evaluation of this step, which must then be repeated."""
        interval = 1 if self.step >= train.total_steps else train.eval_interval
        due = self.own and self.step > 0 and interval > 0 and self.step % interval == 0
        return due and self.values.get("evaluation") is None


def starting_state(cfg: RunConfig, mesh: Mesh, store: Store, source: RowSource | None = None) -> Start:
    """Return the run's own latest complete checkpoint, else that of --resume-from, else --init-from or fresh weights.

    Fresh weights of an architecture with a warm start depend on `source`.
    """
    on_mesh = lambda shape: with_shardings(shape, mesh)

    def latest_complete(store: Store, **options: bool) -> int | None:
        step: int | None = from_leader(lambda: store.latest_complete(**options))  # one process verifies for all
        store.verified.add(step)
        return step

    def restored(source: Store, step: int, name: str) -> Start:
        run = RunFolder(source.folder.parent)
        state, values = source.restore(step, saved_part(sharded_abstract_state(cfg, mesh), cfg.lora))
        before = run.description()
        init_from = before.init_from if before else None
        if cfg.lora.rank:  # the checkpoint holds only adapters
            init_from = base_record(run, step)
            if cfg.train.init_from is not None:  # the base may have moved; `read_record` compares its hash
                init_from |= {"folder": absolute(cfg.train.init_from)}
            base = read_record(init_from, base_of(abstract_state(cfg).model), on_mesh)
            state = eqx.tree_at(lambda s: s.model, state, on_base(state.model, base))
        return Start(state, step, values, f"step {step} of {name}", source is store, before, init_from)

    if (latest := latest_complete(store, set_aside=True)) is not None:
        return restored(store, latest, "this run")
    if (name := cfg.train.resume_from) is not None:
        with Store(name) as other:
            if (latest := latest_complete(other)) is None:
                raise ConfigError(f"--resume-from {name}: that run has no complete checkpoint")
            if latest >= cfg.train.total_steps:
                raise ConfigError(
                    f"--resume-from {name} has already reached step {latest}, and --total-steps is {cfg.train.total_steps}; "
                    "raise "
                    "--total-steps, or start a new schedule from its weights with --init-from"
                )
            return restored(other, latest, f"{name}, with its optimizer, schedule and step count")
    if cfg.train.resume == "must":
        raise ConfigError(f"--resume must: {cfg.train.checkpoint_dir} contains no complete checkpoint; use --resume auto")
    if (name := cfg.train.init_from) is not None:
        record = find_record("--init-from", name, cfg.train.init_step, hashed=cfg.lora.rank > 0)
        model = read_record(record, base_of(abstract_state(cfg).model), on_mesh, verified=True)
        step = f"step {record['step']} of " if "step" in record else ""
        averaged = "averaged " * record.get("averaged", False)
        origin = f"the {averaged}weights of {step}{name}; optimizer, schedule, data and step count are fresh"
        return Start(create_state(cfg, mesh, model), 0, {}, origin, init_from=record)
    model = None if source is None else architecture_of(cfg.model).warm_start(cfg, source, mesh)
    return Start(create_state(cfg, mesh, model), 0, {}, "fresh weights" if model is None else "weights that were solved for")
