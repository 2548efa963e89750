"""Settings that changed since a run began: listed in a line at the start, and kept in run.json."""

from __future__ import annotations

import time
from typing import Any

from nash_mhc.checkpoint.run_folder import flat
from nash_mhc.config.schema import RunConfig
from nash_mhc.optim.schedule import Hyperparameters, learning_rate

# Where a run lies and how it was started are no settings of it.
_NO_SETTINGS = {
    "train.checkpoint_dir", "train.resume", "train.resume_from", "train.init_from", "train.init_step", "train.wait_for_lock",
    "data.cache_dir", "mesh.coordinator_address", "mesh.num_processes", "mesh.process_id",
}  # fmt: skip
_OF_SCHEDULE = {
    "train.total_steps", "optim.learning_rate", "optim.min_lr_ratio", "optim.warmup_steps", "optim.schedule",
    "optim.decay_fraction",
}  # fmt: skip

Changes = dict[str, list[Any]]  # section.key -> [old value, new value]


def changes(before: dict[str, Any], cfg: RunConfig) -> Changes:
    """Of the settings that the run had `before`."""
    now = flat(cfg.to_dict())
    return {k: [before[k], v] for k, v in now.items() if k in before and k not in _NO_SETTINGS and before[k] != v}


def about(changed: Changes, cfg: RunConfig, updates: int) -> list[str]:
    """Lines for the start of a run that has made so many updates before."""
    if not changed:
        return []
    lines = ["settings changed: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())]
    if _OF_SCHEDULE & set(changed):
        values = cfg.to_dict()
        for key, (old, _) in changed.items():
            section, _, name = key.partition(".")
            values[section][name] = old
        before, after = Hyperparameters.of(RunConfig.from_dict(values)), Hyperparameters.of(cfg)
        was, now, end = (
            float(learning_rate(h, n)) for h, n in ((before, updates), (after, updates), (after, int(after.total)))
        )
        lines.append(
            f"the learning rate of the next step is {now:.2e}, with the settings before it would be {was:.2e}; "
            f"{cfg.optim.schedule} now ends at step {cfg.train.total_steps} with {end:.2e}"
        )
    return lines


def added_to(history: list[dict[str, Any]], changed: Changes, step: int) -> list[dict[str, Any]]:
    """With an entry for what changed at this start, if anything did."""
    entry = {"step": step, "at": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": changed}
    return [*history, *([entry] if changed else [])]
