"""The run at Weights & Biases, where there is one."""

from __future__ import annotations

from nash_mhc.telemetry import weights_and_biases
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.train.inputs import Inputs


def wandb_run(inputs: Inputs) -> dict[str, str] | None:
    """Project and id of the run at Weights & Biases;
    the same as before where this folder's run has some, in use or not."""
    wanted, known = inputs.cfg.telemetry.wandb, inputs.folder.description()
    before = known.wandb if known is not None else None
    if wanted is None or (before is not None and before.get("project") == wanted):
        return before
    return {"project": wanted, "id": weights_and_biases.new_id()}


def wandb_sink(inputs: Inputs, run: dict[str, str] | None, reporter: Reporter) -> list[Sink]:
    cfg = inputs.cfg
    if run is None or cfg.telemetry.wandb is None:
        return []
    sink = weights_and_biases.WeightsAndBiases(cfg.telemetry, inputs.folder.path, run["id"], cfg.to_dict())
    reporter.say(f"wandb: run {run['id']} of project {run['project']}, {cfg.telemetry.wandb_mode}")
    return [sink]
