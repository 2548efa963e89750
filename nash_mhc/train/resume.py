"""What a run goes on from: its folder's last whole checkpoint, another run's, or fresh weights."""

from __future__ import annotations

import json
from collections.abc import Callable

from jax.sharding import Mesh

from nash_mhc.checkpoint.faults import one_line
from nash_mhc.checkpoint.folders import exists
from nash_mhc.checkpoint.manifest import numbered
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.places import Folder, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.train.state import TrainState, create_state, sharded_abstract_state

# What a run in a folder that is continued must keep, besides its model: the rows of each step follow from these.
_SAME_DATA = (
    "data.dataset", "data.dataset_name", "data.split", "data.tokenizer", "data.seq_len", "data.text_field", "data.format",
    "data.template", "data.loss_on", "data.max_documents", "data.validation_fraction", "data.streaming", "train.seed",
)  # fmt: skip


def _check_same_run(folder: Folder, cfg: RunConfig, *, rows: str | None) -> None:
    """A run that is continued has the same model and, in its own folder, reads on (the same `rows`) where it stopped."""
    same_data = rows is not None
    try:
        run = json.loads((folder / "run.json").read_text())
        then = run["config"]
        before = {f"{section}.{k}": v for section in ("model", "data", "train") for k, v in then[section].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return
    now = {f"{section}.{k}": v for section in ("model", "data", "train") for k, v in cfg.to_dict()[section].items()}
    kept = [k for k in now if k.startswith("model.")] + [k for k in _SAME_DATA if same_data and k in before]
    changed = [f"{k} ({before.get(k)} there, {now[k]} now)" for k in kept if before.get(k) != now[k]]
    sizes = [d["data.batch_size"] * d["train.grad_accum"] for d in (before, now)]
    if same_data and sizes[0] != sizes[1]:
        changed.append(f"batch-size x grad-accum ({sizes[0]} there, {sizes[1]} now)")
    if same_data and not changed and run.get("rows", "stories") != rows:
        raise ConfigError(
            f"{folder}: the data of --dataset {cfg.data.dataset} has changed since this run began; bring it back, or start "
            f"another run with --resume-from {folder} and a new --checkpoint-dir"
        )
    if changed:
        raise ConfigError(f"{folder} holds another run: {', '.join(changed)}; choose another --checkpoint-dir")


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


def starting_state(cfg: RunConfig, mesh: Mesh, store: Store, say: Callable[[str], None]) -> tuple[TrainState, int, int, str]:
    """(state, steps done, tokens seen, where from): the folder's own last checkpoint, else --resume-from, else a fresh one."""

    def restored(source: Store, step: int, name: str) -> tuple[TrainState, int, int, str]:
        state, values = source.restore(step, sharded_abstract_state(cfg, mesh))
        return state, step, int(values["tokens_seen"]), f"step {step} of {name}"

    if (latest := store.newest(say, set_aside=True)) is not None:
        return restored(store, latest, "this run")
    if cfg.train.resume_from is None:
        if cfg.train.resume == "must":
            raise ConfigError(f"--resume must: {cfg.train.checkpoint_dir} holds no finished checkpoint; use --resume auto")
        return create_state(cfg, mesh), 0, 0, "fresh weights"
    with Store(cfg.train.resume_from) as other:
        if (latest := other.newest(say)) is None:
            raise ConfigError(f"--resume-from {cfg.train.resume_from}: its checkpoints folder holds no finished checkpoint")
        return restored(other, latest, cfg.train.resume_from)
