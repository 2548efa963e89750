"""What a run starts from: its own latest complete checkpoint, another run's, another model's weights, or fresh ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import Description, RunFolder, flatten_config
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.key_names import key_of_any_kind
from nash_mhc.config.schema import KIT_SECTIONS, ArchitectureConfig, ConfigError, ModelConfig, RunConfig, TrainConfig
from nash_mhc.hub import stored
from nash_mhc.hub.folder import HubFolder, is_hub_folder
from nash_mhc.hub.importing import check_fits
from nash_mhc.model.architectures import abstract_model, check_drawn
from nash_mhc.model.lora import base_of, on_base
from nash_mhc.objectives.registry import carries
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import with_shardings
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import exists, is_remote
from nash_mhc.telemetry.sinks import without_nan
from nash_mhc.train.state import TrainState, abstract_state, create_state, saved_part, sharded_abstract_state

# Settings that a resumed run must keep, besides its model: the rows of each step follow from these.
_SAME_DATA = (
    "data.dataset", "data.dataset_name", "data.split", "data.tokenizer", "data.seq_len", "data.text_field", "data.format",
    "data.template", "data.prompt_template", "data.response_template", "data.loss_on", "data.max_documents",
    "data.validation_fraction", "data.test_fraction", "data.test_split", "data.streaming", "train.seed",
)  # fmt: skip
_ROWS_A_STEP = "batch-size x grad-accum"


def checkpoint_values(
    config: dict[str, Any],
    step: int,
    *,
    rows: str,
    counted: dict[str, Any],
    metrics: dict[str, Any],
    evaluation: dict[str, float] | None,
    base: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the plain values of a checkpoint, beside the arrays.

    `metrics` are those of the step itself, `counted` is what the meter resumes from, `rows` names the data, `base` the
    weights that the arrays are adapters of.
    """
    data, train = config["data"], config["train"]
    return {
        "step": step,
        "config": config,
        **counted,
        # Rows are read in an order that follows from the seed, so the count of those read says which ones come next.
        "data": {"rows_read": step * data["batch_size"] * train["grad_accum"], "rows": rows},
        # There is no generator whose state could be lost: all randomness of a run follows from these two numbers.
        "rng": {"seed": train["seed"], "step": step},
        "metrics": {k: without_nan(v.tolist()) for k, v in metrics.items()},
        "evaluation": evaluation,
    } | ({} if base is None else {"base": base})


def _with_rows_a_step(values: dict[str, Any]) -> dict[str, Any]:
    return values | {_ROWS_A_STEP: values["data.batch_size"] * values["train.grad_accum"]}


def _check_same_run(folder: RunFolder, cfg: RunConfig, *, rows: str | None) -> None:
    """Raise ConfigError unless a resumed run has the same model and, in its own folder, the same data (`rows`)."""
    if (described := folder.description()) is None:
        return
    before, now = _with_rows_a_step(described.config), _with_rows_a_step(flatten_config(cfg.to_dict()))
    if before["model_kind"] != cfg.model_kind:
        raise ConfigError(
            f"{folder} holds another run: --model-kind {before['model_kind']} there, {cfg.model_kind} now; give the same, or "
            "choose another --checkpoint-dir"
        )
    kept = [k for k in now if k.startswith("model.")]
    if bool(before.get("optim.ema_decay")) != bool(now["optim.ema_decay"]):  # averaged weights are there, or they are not
        kept.append("optim.ema_decay")
    # Moments are kept of what is trained, and each optimizer has its own. (Runs of before did not say.)
    before = {"optim.optimizer": "adamw"} | before
    kept += ["optim.optimizer", "optim.freeze", "optim.train_only"]
    if before.get("lora.rank") or now["lora.rank"]:  # dropout and what follows from it may change on the way
        kept += [f"lora.{name}" for name in ("rank", "alpha", "targets", "rslora", "base_dtype")]
    for name, kind in KIT_SECTIONS.items():
        if kind.switch and (before.get(f"{name}.{kind.switch}") or now[f"{name}.{kind.switch}"]):
            kept += [k for k in now if k.startswith(f"{name}.")]
    if carries(cfg):  # one part a row
        kept += ["objective.name", "data.batch_size", "train.grad_accum"]
    if rows is not None:
        kept += [k for k in (*_SAME_DATA, _ROWS_A_STEP) if k in before]
    if changed := [f"{k} ({before.get(k)} there, {now[k]} now)" for k in kept if before.get(k) != now[k]]:
        raise ConfigError(
            f"{folder} holds another run: {', '.join(changed)}; {_same_again(before, now, changed)}, or choose another "
            "--checkpoint-dir"
        )
    check_drawn(cfg.model, described.drawn, str(folder))
    if rows is not None and described.rows != rows:
        teacher = f" or the model in --distill-teacher {cfg.distill.teacher}" if cfg.distill.teacher else ""
        raise ConfigError(
            f"{folder}: the data of --dataset {cfg.data.dataset}{teacher} has changed since this run began; bring it "
            f"back, or start another run from its weights with --init-from {folder} and a new --checkpoint-dir"
        )


def _same_again(before: dict[str, Any], now: dict[str, Any], changed: list[str]) -> str:
    """Say which flags make the run the same again."""
    if not any(text.startswith(_ROWS_A_STEP) for text in changed):
        return "give the same"
    rows, batch = before[_ROWS_A_STEP], now["data.batch_size"]
    parts = (batch, rows // batch) if rows % batch == 0 else (before["data.batch_size"], before["train.grad_accum"])
    keeps = f"--batch-size {parts[0]} --grad-accum {parts[1]} keeps {rows} sequences per step"
    return keeps if len(changed) == 1 else f"give the same ({keeps})"


def _check_nothing_is_lost(folder: RunFolder) -> None:
    """Raise ConfigError if rows of metrics name lost checkpoints: a fresh start would erase the rows."""
    if not (last := folder.last_row()):
        return
    if folder.missing(()) or last.get("last_checkpoint") is not None:
        saved = f"that of step {last['last_checkpoint']} is" if last.get("last_checkpoint") is not None else "they are"
        raise ConfigError(
            f"{folder}: metrics.jsonl has rows up to step {last.get('step')}, but its checkpoints are missing ({saved} gone); "
            f"bring them back, or choose another --checkpoint-dir; nothing was changed"
        )


def check_resume(cfg: RunConfig, *, rows: str) -> None:
    """Raise ConfigError unless what the run would resume or start from fits it; nothing is written yet."""
    wanted, named = cfg.train.resume, cfg.train.checkpoint_dir
    own = RunFolder(named) if named else None
    with as_config_error(f"--checkpoint-dir {named}"):
        if own and own.is_imported():
            raise ConfigError(
                f"--checkpoint-dir {named}: holds an imported model, which no run has begun with; start one from it with "
                f"--init-from {named}, in a folder of its own"
            )
        held = own.finished() if own else []
        if own and not held and not own.set_aside():
            _check_nothing_is_lost(own)
    if wanted == "never" and held:
        raise ConfigError(f"--resume never: {named} holds checkpoints (up to step {held[-1]}); choose another --checkpoint-dir")
    if wanted == "must" and not held and cfg.train.resume_from is None:
        where = f"{named} holds no checkpoint" if named else "no folder is named"
        raise ConfigError(f"--resume must: {where}; give the --checkpoint-dir of a run that has one")
    if not held:  # otherwise the run goes on with its own
        if cfg.train.resume_from is not None:
            _check_same_run(other_run("--resume-from", cfg.train.resume_from), cfg, rows=None)
        if cfg.train.init_from is not None:
            _check_weights(cfg.model, cfg.train.init_from, cfg.train.init_step)
        elif cfg.lora.rank and cfg.train.resume_from is None:
            raise ConfigError(
                "--lora-rank: adapters correct a model that there is; name its folder with --init-from, a run's or a Hugging "
                "Face model's"
            )
    elif own and cfg.train.init_from is not None and not cfg.lora.rank:
        _check_began_with(own, cfg.train.init_from)
    if own and own.has_checkpoint():  # without a checkpoint there is nothing that another shape or batch could not suit
        _check_same_run(own, cfg, rows=rows)


def _check_began_with(folder: RunFolder, init_from: str) -> None:
    """Raise ConfigError if the run in this folder began with another model than --init-from."""
    if (described := folder.description()) is None:
        return
    began = (described.init_from or {}).get("folder") or described.config.get("train.init_from")
    whole = lambda name: name if is_remote(name) else str(Path(name).expanduser().absolute())
    if began is None or whole(began) != whole(init_from):
        raise ConfigError(
            f"--init-from {init_from}: {folder} holds a run already, which began with {began or 'fresh weights'}; choose "
            f"another --checkpoint-dir, or leave --init-from out to go on with that run"
        )


def _check_weights(model: ArchitectureConfig, name: str, step: int | None) -> None:
    """Raise ConfigError unless the weights that --init-from names fit this model."""
    if is_remote(name) or not is_hub_folder(name):
        folder = other_run("--init-from", name)
        _check_has_step(folder, step)
        _check_shapes(model, folder)
        return
    if step is not None:
        raise ConfigError(f"--init-step {step}: {name} is a Hugging Face model, and has no steps")
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"--init-from {name}: a Hugging Face model cannot become a {model.architecture}")
    weights = HubFolder(name)
    weights.check()
    check_fits(weights, model)


def _check_shapes(model: ArchitectureConfig, folder: RunFolder) -> None:
    """Raise ConfigError if the parameters of the model and those in the folder differ in shape."""
    try:
        theirs = folder.config().model
    except ConfigError:
        return  # lost, or of another version: reading the weights will find out
    if type(model) is not type(theirs) or _shapes(model) == _shapes(theirs):
        return
    was, now = vars(theirs), vars(model)
    changed = [name for name in now if now[name] != was[name]]
    # Name the keys that change the shapes on their own; if there is none, all that differ.
    alone = [name for name in changed if _shapes_differ(theirs, name, now[name])] or changed
    flags = [key_of_any_kind(f"model.{name}").flag for name in alone]
    raise ConfigError(
        f"--init-from {folder}: its weights have other shapes: "
        + ", ".join(f"model.{name} {was[name]} there, {now[name]} now" for name in alone)
        + f"; leave {' and '.join(flags)} out, or train from fresh weights without --init-from"
    )


def _shapes(model: ArchitectureConfig) -> dict[str, Any]:
    """Return the shape of each parameter by name."""
    return {name: array.shape for name, array in named_leaves(abstract_model(model)).items()}


def _shapes_differ(model: ArchitectureConfig, name: str, value: Any) -> bool:
    """Whether this key alone changes the shapes of the model."""
    try:
        return _shapes(dataclasses.replace(model, **{name: value})) != _shapes(model)  # type: ignore[type-var]
    except ConfigError:
        return True


def other_run(flag: str, name: str) -> RunFolder:
    """Return the folder of another run; ConfigError if it has no checkpoints."""
    with as_config_error(f"{flag} {name}"):
        found = exists(RunFolder(name).checkpoints, kind="directory")
    if not found:
        raise ConfigError(f"{flag} {name}: no run with checkpoints there; give the --checkpoint-dir of an earlier run")
    return RunFolder(name)


def _check_has_step(folder: RunFolder, step: int | None) -> None:
    steps = folder.steps()
    if not steps or (step is not None and step not in steps):
        asked, there = "" if step is None else f" --init-step {step}", ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"--init-from {folder}{asked}: no such checkpoint there; it has {there}")


class Start(NamedTuple):
    """The state that a run starts from, and what is known about it."""

    state: TrainState
    step: int  # steps done
    values: dict[str, Any]  # saved beside it
    origin: str  # in words
    own: bool = False  # whether this very run has saved it
    before: Description | None = None  # what is known of the run that it goes on with
    init_from: dict[str, Any] | None = None  # whose weights it began with

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.before.history if self.before is not None else []

    def evaluation_missing(self, train: TrainConfig) -> bool:
        """Whether the run was stopped during the evaluation of this step, which must then be repeated."""
        interval = 1 if self.step >= train.total_steps else train.eval_interval
        due = self.own and self.step > 0 and interval > 0 and self.step % interval == 0
        return due and self.values.get("evaluation") is None


def starting_state(
    cfg: RunConfig, mesh: Mesh, store: Store, say: Callable[[str], None], fresh: Callable[[], Any | None] = lambda: None
) -> Start:
    """Return the folder's own latest checkpoint, else that of --resume-from, else fresh weights: `fresh()` or drawn."""

    def newest(source: Store, **options: bool) -> int | None:
        found: int | None = from_leader(lambda: source.latest_complete(say, **options))  # one process verifies for all
        source.mark_verified(found)
        return found

    def restored(source: Store, step: int, name: str) -> Start:
        run = RunFolder(source.folder.parent)
        state, values = source.restore(step, saved_part(cfg, sharded_abstract_state(cfg, mesh)))
        before = run.description()
        init_from = before.init_from if before else None
        if cfg.lora.rank:
            init_from = stored.base_record(run, step)
            if cfg.train.init_from is not None:  # it may lie elsewhere by now: its hash says whether it is the same
                init_from |= {"folder": stored.absolute(cfg.train.init_from)}
            base = stored.read(init_from, base_of(abstract_state(cfg).model), lambda shape: with_shardings(shape, mesh), say)
            state = eqx.tree_at(lambda s: s.model, state, on_base(state.model, base))
        return Start(state, step, values, f"step {step} of {name}", source is store, before, init_from)

    if (latest := newest(store, set_aside=True)) is not None:
        return restored(store, latest, "this run")
    if cfg.train.resume_from is not None:
        with Store(cfg.train.resume_from) as other:
            if (latest := newest(other)) is None:
                raise ConfigError(f"--resume-from {cfg.train.resume_from}: its checkpoints folder holds no finished checkpoint")
            if latest >= cfg.train.total_steps:
                raise ConfigError(
                    f"--resume-from {cfg.train.resume_from}: is at step {latest} already, and --total-steps is "
                    f"{cfg.train.total_steps}; raise it to go on, or start anew from its weights with --init-from"
                )
            return restored(other, latest, f"{cfg.train.resume_from}, with its optimizer, schedule and step count")
    if cfg.train.resume == "must":
        raise ConfigError(f"--resume must: {cfg.train.checkpoint_dir} holds no finished checkpoint; use --resume auto")
    if cfg.train.init_from is not None:
        return _from_weights(cfg, mesh, cfg.train.init_from, say)
    model = fresh()
    return Start(create_state(cfg, mesh, model), 0, {}, "fresh weights" if model is None else "weights that were solved for")


def _from_weights(cfg: RunConfig, mesh: Mesh, name: str, say: Callable[[str], None]) -> Start:
    """Return the weights of another run (averaged ones if it has them) or a Hugging Face folder; the rest is fresh."""
    record = stored.find("--init-from", name, cfg.train.init_step, hashed=cfg.lora.rank > 0, say=say)
    base = base_of(abstract_state(cfg).model)
    model = stored.read(record, base, lambda shape: with_shardings(shape, mesh), say, verified=True)
    step = f"step {record['step']} of " if "step" in record else ""
    averaged = "averaged " * record.get("averaged", False)
    origin = f"the {averaged}weights of {step}{name}; optimizer, schedule, data and step count are fresh"
    return Start(create_state(cfg, mesh, model), 0, {}, origin, init_from=record)
