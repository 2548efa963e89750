"""What a run goes on from: its folder's last whole checkpoint, another run's, or fresh weights; and what fits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from nash_mhc.checkpoint.faults import one_line
from nash_mhc.checkpoint.folders import exists
from nash_mhc.checkpoint.manifest import numbered, values_of
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.places import Folder, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.parallel.processes import from_leader
from nash_mhc.train.state import TrainState, create_state, sharded_abstract_state
from nash_mhc.train.telemetry import without_nan

# What a run in a folder that is continued must keep, besides its model: the rows of each step follow from these.
_SAME_DATA = (
    "data.dataset", "data.dataset_name", "data.split", "data.tokenizer", "data.seq_len", "data.text_field", "data.format",
    "data.template", "data.loss_on", "data.max_documents", "data.validation_fraction", "data.streaming", "train.seed",
)  # fmt: skip


def checkpoint_values(
    cfg: RunConfig,
    step: int,
    *,
    rows: str,
    counted: dict[str, Any],
    metrics: dict[str, Any],
    evaluation: dict[str, float] | None,
) -> dict[str, Any]:
    """The plain values of a checkpoint, beside the arrays.

    `metrics` are those of the step itself, `counted` is what the meter goes on from, `rows` names the data.
    """
    return {
        "step": step,
        "config": cfg.to_dict(),
        **counted,
        # Rows are read in an order that follows from the seed, so the count of those read says which ones come next.
        "data": {"rows_read": step * cfg.data.batch_size * cfg.train.grad_accum, "rows": rows},
        # There is no generator whose state could be lost: all randomness of a run follows from these two numbers.
        "rng": {"seed": cfg.train.seed, "step": step},
        "metrics": {k: without_nan(v.tolist()) for k, v in metrics.items()},
        "evaluation": evaluation,
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """`data.batch_size` -> 8; KeyError or TypeError for what is no configuration."""
    flat = {f"{section}.{k}": v for section in ("model", "data", "optim", "train") for k, v in config[section].items()}
    flat["batch-size x grad-accum"] = flat["data.batch_size"] * flat["train.grad_accum"]
    return flat


def _told(folder: Folder) -> tuple[dict[str, Any], str | None] | None:
    """(configuration, identity of the rows) of the run in a folder, from run.json or else its newest checkpoint that has them.

    None where nothing can be read: there is no run, or nothing of it that could be used.
    """
    try:
        run = json.loads((folder / "run.json").read_text())
        return _flat(run["config"]), str(run["rows"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # lost or damaged: every checkpoint knows it as well
    for step in reversed(numbered(folder / "checkpoints")):
        values = values_of(folder / "checkpoints" / str(step))
        try:
            return _flat(values["config"]), str(values["data"]["rows"])
        except (KeyError, TypeError, AttributeError):
            continue
    return None


def _check_same_run(folder: Folder, cfg: RunConfig, *, rows: str | None) -> None:
    """A run that is continued has the same model and, in its own folder, reads on (the same `rows`) where it stopped."""
    if (told := _told(folder)) is None:
        return
    (before, rows_before), now = told, _flat(cfg.to_dict())
    kept = [k for k in now if k.startswith("model.")]
    if bool(before.get("optim.ema_decay")) != bool(now["optim.ema_decay"]):  # averaged weights are there, or they are not
        kept.append("optim.ema_decay")
    if rows is not None:
        kept += [k for k in (*_SAME_DATA, "batch-size x grad-accum") if k in before]
    if changed := [f"{k} ({before.get(k)} there, {now[k]} now)" for k in kept if before.get(k) != now[k]]:
        raise ConfigError(f"{folder} holds another run: {', '.join(changed)}; choose another --checkpoint-dir")
    if rows is not None and rows_before != rows:
        raise ConfigError(
            f"{folder}: the data of --dataset {cfg.data.dataset} has changed since this run began; bring it back, or start "
            f"another run with --resume-from {folder} and a new --checkpoint-dir"
        )


def check_resume(cfg: RunConfig, *, rows: str) -> None:
    """Whether what the run would go on from fits it; looked at before anything is made, changed or compiled."""
    wanted, named = cfg.train.resume, cfg.train.checkpoint_dir
    with one_line(f"--checkpoint-dir {named}"):
        held = numbered(place(named) / "checkpoints") if named else []
    if wanted == "never" and held:
        raise ConfigError(f"--resume never: {named} holds checkpoints (up to step {held[-1]}); choose another --checkpoint-dir")
    if wanted == "must" and not held and cfg.train.resume_from is None:
        where = f"{named} holds no checkpoint" if named else "no folder is named"
        raise ConfigError(f"--resume must: {where}; give the --checkpoint-dir of a run that has one")
    if cfg.train.resume_from is not None:
        other = place(cfg.train.resume_from)
        with one_line(f"--resume-from {other}"):
            found = exists(other / "checkpoints", kind="directory")
        if not found:
            raise ConfigError(
                f"--resume-from {other}: no run with checkpoints there; give the --checkpoint-dir of an earlier run"
            )
        _check_same_run(other, cfg, rows=None)
    if named:
        _check_same_run(place(named), cfg, rows=rows)


class Start(NamedTuple):
    """What a run begins with."""

    state: TrainState
    step: int  # steps done
    values: dict[str, Any]  # saved beside it
    origin: str  # in words
    own: bool  # whether this very run has saved it

    def evaluation_missing(self, interval: int) -> bool:
        """Whether the run was stopped in the middle of an evaluation, which the one that goes on has to make up for."""
        due = self.own and self.step > 0 and interval > 0 and self.step % interval == 0
        return due and self.values.get("evaluation") is None


def starting_state(cfg: RunConfig, mesh: Mesh, store: Store, say: Callable[[str], None]) -> Start:
    """The folder's own last checkpoint, else that of --resume-from, else fresh weights."""

    def newest(source: Store, **options: bool) -> int | None:
        found: int | None = from_leader(lambda: source.newest(say, **options))  # one process verifies for all
        source.trust(found)
        return found

    def restored(source: Store, step: int, name: str) -> Start:
        state, values = source.restore(step, sharded_abstract_state(cfg, mesh))
        return Start(state, step, values, f"step {step} of {name}", source is store)

    if (latest := newest(store, set_aside=True)) is not None:
        return restored(store, latest, "this run")
    if cfg.train.resume_from is None:
        if cfg.train.resume == "must":
            raise ConfigError(f"--resume must: {cfg.train.checkpoint_dir} holds no finished checkpoint; use --resume auto")
        return Start(create_state(cfg, mesh), 0, {}, "fresh weights", own=False)
    with Store(cfg.train.resume_from) as other:
        if (latest := newest(other)) is None:
            raise ConfigError(f"--resume-from {cfg.train.resume_from}: its checkpoints folder holds no finished checkpoint")
        return restored(other, latest, cfg.train.resume_from)
