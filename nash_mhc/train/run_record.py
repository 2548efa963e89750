"""What a run logs and records at its start: first lines, run.json, parameters.txt, changes, Weights & Biases."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc import __version__
from nash_mhc.checkpoint.run_folder import PARAMETERS, RUN, flatten_config
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, MeshConfig, RunConfig, TelemetryConfig
from nash_mhc.data.inspection import summarize_epochs
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.loading.formats import copied_companions
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.model.protocol import LanguageModel
from nash_mhc.model.weights import count_by_storage
from nash_mhc.optim.schedule import Hyperparameters, learning_rate
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.mesh import describe
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.processes import unread_variables
from nash_mhc.storage.errors import reason
from nash_mhc.storage.files import is_remote
from nash_mhc.telemetry.sinks import NullTelemetry, Sink, Telemetry, WeightsAndBiases, new_wandb_id
from nash_mhc.telemetry.terminal import JsonReporter, LivePanel, Reporter, is_terminal
from nash_mhc.train.inputs import Inputs
from nash_mhc.train.resume import Start
from nash_mhc.train.state import abstract_state

log = logging.getLogger(__name__)
_MAX_PLAUSIBLE_RATE = 0.1  # ten times the largest learning rate of any preset or recipe
_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")
# How and where a run was started; not settings of the run itself.
_NOT_SETTINGS = {
    "train.checkpoint_dir", "train.resume", "train.resume_from", "train.init_from", "train.init_step", "train.wait_for_lock",
    "data.cache_dir", "mesh.coordinator_address", "mesh.num_processes", "mesh.process_id", "mesh.connect_timeout", "kit",
}  # fmt: skip
_OF_SCHEDULE = {
    "train.total_steps", "optim.learning_rate", "optim.min_lr_ratio", "optim.warmup_steps", "optim.schedule",
    "optim.decay_fraction",
}  # fmt: skip

Changes = dict[str, list[Any]]  # section.key -> [old value, new value]


@dataclass(frozen=True)
class Record:
    texts: dict[str, str | bytes]  # file name -> content; the saver writes them again if the run directory vanishes
    changed: Changes  # settings that changed since the last start
    wandb: dict[str, str] | None  # project and id of the run at Weights & Biases


def record(inputs: Inputs, mesh: Mesh, start: Start, invocation: dict[str, Any]) -> Record:
    """Describe the run; `invocation` has its requested settings, the command, and the memory and speed estimate."""
    config, model, device, before = inputs.cfg.recorded(), inputs.cfg.model, mesh.devices.flat[0], start.before
    architecture = architecture_of(model)
    changed = _changes(before.config, flatten_config(config)) if before is not None else {}
    history = [*before.history] if before is not None else []
    if changed:
        history.append({"step": start.step, "at": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": changed})
    commands = before.commands if start.own and before is not None else ()
    wandb = from_leader(lambda: _wandb_run(inputs))
    run = {
        "config": config,
        "rows": inputs.identity,
        "parameters": count_parameters(model),
        "drawn": None if (drawn := architecture.random_weights(model)) is None else drawn._asdict(),
        "flops_per_token": flops_per_token(inputs.cfg),
        "mesh": {axis: mesh.shape[axis] for axis in mesh.axis_names},
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": mesh.size,
            "there": jax.device_count(device.platform),
        },
        "versions": {"nash_mhc": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "floor": None if inputs.floor is None else {"nats_per_token": inputs.floor[0], "bits_per_byte": inputs.floor[1]},
        **invocation,
        "init_from": start.init_from,
        "history": history,
        "wandb": wandb,
        "commands": [*commands, *(text for text in invocation["commands"] if text not in commands[-1:])],
    }
    texts: dict[str, str | bytes] = {RUN: json.dumps(run, indent=2) + "\n", PARAMETERS: _parameter_table(start.state.model)}
    # The tokenizer and other small files of the Hugging Face model that the run began with, for a later export.
    began = (start.init_from or {}).get("folder")
    beside = copied_companions(Path(began)) if began is not None and not is_remote(began) else {}
    return Record({**texts, **beside}, changed, wandb)


def open_telemetry(inputs: Inputs, record: Record, *, evaluated: int, step: int, sinks: Sequence[Sink]) -> Telemetry:
    """Write the record and open metrics.jsonl and eval.jsonl, without rows after `step` and `evaluated`."""
    if jax.process_index() > 0:
        return NullTelemetry()
    configuration = "".join(f"    {line}\n" for line in json.dumps(inputs.cfg.to_dict(), indent=2).splitlines())
    others = [*sinks, *_wandb_sink(inputs, record.wandb)]
    try:
        inputs.folder.write(record.texts)
        return Telemetry(
            inputs.folder.path,
            start_step=step,
            evaluated=evaluated,
            owner=inputs.owner,
            others=others,
            texts={"configuration": configuration},
        )
    except OSError as error:
        remedy = "free space there or choose another --checkpoint-dir"
        raise ConfigError(f"--checkpoint-dir {inputs.folder}: cannot be written ({reason(error)}); {remedy}") from error


def _parameter_table(model: LanguageModel) -> str:
    """Return name, shape and size of every parameter."""
    from clu import parameter_overview  # brings flax along, which takes a second to import

    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in named_leaves(model).items()}
    return parameter_overview.get_parameter_overview(shapes, include_stats=False) + "\n"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Changes:
    """Return the settings that differ (section.key -> value)."""
    return {k: [before[k], v] for k, v in now.items() if k in before and k not in _NOT_SETTINGS and before[k] != v}


def describe_changes(changed: Changes, config: dict[str, Any], updates: int) -> None:
    """Log which settings changed since the run's last start; `config` are those now, after `updates` updates."""
    if not changed:
        return
    log.info("settings changed: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items()))
    if _OF_SCHEDULE & set(changed):
        values = {name: dict(part) if isinstance(part, dict) else part for name, part in config.items()}
        for key, (old, _) in changed.items():
            section, _, name = key.partition(".")
            values[section][name] = old
        configs = [RunConfig.from_dict(settings) for settings in (values, config)]
        before, after = (Hyperparameters.of(cfg.optim, cfg.train) for cfg in configs)
        was, now, end = (
            float(learning_rate(h, n)) for h, n in ((before, updates), (after, updates), (after, int(after.total)))
        )
        log.info(
            f"learning rate of the next step: {now:.2e} (was {was:.2e} with the old settings); "
            f"{config['optim']['schedule']} now ends at step {config['train']['total_steps']} with {end:.2e}"
        )


def _wandb_run(inputs: Inputs) -> dict[str, str] | None:
    """Return the project and id of the run at Weights & Biases, the same as before if the run has them."""
    wanted, known = inputs.cfg.telemetry.wandb, inputs.folder.description()
    before = known.wandb if known is not None else None
    if wanted is None or (before is not None and before.get("project") == wanted):
        return before
    return {"project": wanted, "id": new_wandb_id()}


def _wandb_sink(inputs: Inputs, run: dict[str, str] | None) -> list[Sink]:
    cfg = inputs.cfg
    if run is None or cfg.telemetry.wandb is None:
        return []
    sink = WeightsAndBiases(cfg.telemetry, inputs.folder.path, run["id"], cfg.to_dict())
    log.info(f"wandb: run {run['id']} of project {run['project']}, {cfg.telemetry.wandb_mode}")
    return [sink]


# --- the first lines -------------------------------------------------------------------------------------------------


def make_reporter(cfg: TelemetryConfig, total_steps: int, *, shown: bool) -> Reporter:
    if cfg.log_format == "json":
        return JsonReporter(total_steps, None)
    has_panel = shown and is_terminal() and cfg.log_level in ("debug", "info")
    return (LivePanel if has_panel else Reporter)(total_steps, None)


def describe_devices(requested: MeshConfig, mesh: MeshConfig, batch_size: int, learning_rate: float) -> None:
    """Log which settings were resolved for the devices: `requested` became `mesh`."""
    if mesh.profile_for is not None:
        log.info(f"--profile-for {mesh.profile_for}: --batch-size {batch_size} --learning-rate {learning_rate:g}")
    for line in unread_variables(requested, os.environ):
        log.warning(line)
    if "," in requested.platform:
        log.info(f"--platform {requested.platform}: using {mesh.platform}")


def describe_run(inputs: Inputs, mesh: Mesh) -> None:
    """Log what the run trains: devices, parameters, directory, data, batch, and held-out data."""
    cfg = inputs.cfg
    parameters = _parameters(cfg.model, abstract_state(cfg).model, Training.of(cfg), has_adapters=cfg.lora.rank > 0)
    log.info(f"{describe(mesh)}, {cfg.train.dtype}, remat {cfg.train.kept}; {parameters}; run in {inputs.folder}")
    if cfg.optim.optimizer in ("adamw", "adam_atan2", "muon", "normuon") and cfg.optim.learning_rate > _MAX_PLAUSIBLE_RATE:
        rate = f"--learning-rate {cfg.optim.learning_rate:g}"
        log.warning(f"warning: {rate} is far above the usual 1e-4 to 1e-2; the loss will rise")
    for line in inputs.summary(mesh):
        log.info(line)
    if inputs.evaluator is None:
        log.info(f"no evaluation: {cfg.data.dataset} has no held-out data")
    elif inputs.source.held_out:
        log.info(inputs.source.held_out)


def describe_epochs(inputs: Inputs) -> None:
    """Log how often the run reads its data, if that is known."""
    if reads := summarize_epochs(inputs.source.epochs(inputs.cfg.train.total_steps * inputs.sequences_per_step)):
        log.info(f"the run {reads}")


def _parameters(cfg: ArchitectureConfig, model: Any, training: Training, *, has_adapters: bool) -> str:
    text = f"{count_parameters(cfg):,} parameters"
    if (drawn := architecture_of(cfg).random_weights(cfg)) is not None:
        text += f", and {drawn.numbers:,} frozen random weights from seed {drawn.seed}"
    text += "".join(f", {count:,} with {storage}" for storage, count in sorted(count_by_storage(model).items()))
    trained, frozen = training.split(model)
    if not jax.tree.leaves(frozen):
        return text
    count = f"{sum(leaf.size for leaf in jax.tree.leaves(trained)):,}"
    return f"{text}, and {count} trained adapter parameters" if has_adapters else f"{text}; {count} are trained"
