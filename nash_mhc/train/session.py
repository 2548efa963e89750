"""A run that is ready to train: its step compiled, its state restored, its files open;
and what it does between steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.run_folder import EVALUATIONS
from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.commands import module_command
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.inspection import rows_of_step
from nash_mhc.hub.importing import contents_beside
from nash_mhc.parallel.board import from_leader
from nash_mhc.runtime.compiled import CompiledStep, Program
from nash_mhc.runtime.hardware import peak_flops, peak_memory
from nash_mhc.runtime.profile import Profile
from nash_mhc.runtime.program_cache import remove_programs
from nash_mhc.runtime.signals import SIGNALS
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.errors import reason
from nash_mhc.storage.paths import is_remote
from nash_mhc.telemetry.fan_out import Nowhere, Telemetry
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train import changed_settings
from nash_mhc.train.best import Best
from nash_mhc.train.evaluate import BrokenOff
from nash_mhc.train.inputs import Inputs
from nash_mhc.train.meter import Meter
from nash_mhc.train.programs import compile_train_step
from nash_mhc.train.resume import Start, checkpoint_values, starting_state
from nash_mhc.train.run_json import described
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import TrainState, flops_per_token, saved_part, sharded_abstract_state
from nash_mhc.train.wandb_run import wandb_run, wandb_sink
from nash_mhc.train.warm_start import warm_model


class BadSteps(Exception):
    """Too many steps in a row whose updates were skipped."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.first, self.last = first, last


@dataclass
class Session:
    inputs: Inputs
    mesh: Mesh
    start: Start
    step_fn: CompiledStep
    store: Store
    saver: Saver
    telemetry: Telemetry
    meter: Meter
    reporter: Reporter
    watch: Watch
    clock: WallClock
    samples: Samples
    evaluation_program: Program | None = None  # where text is held out
    profile: Profile | None = None
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)  # the last one
    evaluated_at: int | None = None  # its step
    sample: str | None = None  # the last one
    best: Best = dataclasses.field(default_factory=Best)

    @property
    def cfg(self) -> RunConfig:
        return self.inputs.cfg

    @property
    def done(self) -> bool:
        return self.start.step >= self.cfg.train.total_steps or self.has_waited_enough

    @property
    def has_waited_enough(self) -> bool:
        """Whether as many evaluations as --patience says were no better than the best."""
        return 0 < self.cfg.train.patience <= self.best.since

    @property
    def begins_with_evaluation(self) -> bool:
        """Whether the process before this one was stopped in the middle of the evaluation of its last step."""
        return _evaluation_missing(self.inputs, self.start)

    def evaluate(self, state: TrainState, step: int, *, write_row: bool = True) -> None:
        """On the held-out text, if there is any, with a sample of what the model writes; a signal breaks it off."""
        if (evaluator := self.inputs.evaluator) is None:
            if step >= self.cfg.train.total_steps:
                self.sample = self.samples.write(state.best_model)
            return

        def should_stop() -> bool:
            self.watch.doing(f"evaluation at step {step}", working=True)
            return self.watch.should_stop()

        try:
            with self.clock.during("compile"):
                self._wait_for_evaluation()
            with self.clock.during("evaluation"):
                found = evaluator.evaluate(state.model, should_stop)
                if state.ema is not None:
                    found["eval/loss_ema"] = evaluator.evaluate(state.best_model, should_stop)["eval/loss"]
                self.sample = self.samples.write(state.best_model)
        except BrokenOff:
            self.reporter.say(f"the evaluation at step {step} is broken off; the run that goes on from here begins with it")
            return
        self.evaluation.update(found)
        self.evaluated_at = step
        self.best = self.best.after(step, found["eval/loss"])
        if write_row:
            written = {} if self.sample is None else {"sample": self.sample}
            self.telemetry.write(step, self.evaluation | self.meter.inside | written, file=EVALUATIONS)
        self.reporter.evaluation(step, self.evaluation, self.inputs.floor, self.sample)

    def _wait_for_evaluation(self) -> None:
        """Until its program is compiled; BrokenOff where a signal comes first."""
        while self.evaluation_program is not None and not self.evaluation_program.done():
            self.watch.doing("compiling the evaluation")
            if self.watch.should_stop():
                raise BrokenOff
            futures.wait([self.evaluation_program], timeout=0.1)

    def save(self, state: TrainState, step: int, *, wait: bool = False) -> None:
        """Starts to save; with `wait`, returns when the checkpoint is whole."""
        self.watch.doing(f"saving step {step}")  # which storage may hold up for as long as it likes
        with self.clock.during("checkpoint"), jax.transfer_guard("allow"):  # Orbax copies the state to the host in its own way
            values = checkpoint_values(
                self.cfg,
                step,
                rows=self.inputs.identity,
                counted=self.meter.to_json() | {"clock": self.clock.to_json(), "best": self.best.to_json()},
                metrics=self.meter.last,
                evaluation=dict(self.evaluation) if self.evaluated_at == step else None,
                base=self.start.init_from if self.cfg.lora.rank else None,
            )
            self.saver.save(saved_part(self.cfg, state), step, values, wait=wait)

    def write_row(self, step: int) -> None:
        """What the steps since the last row amount to, and what no step has measured."""
        row = self.meter.row() | self.clock.row()
        if (peak := peak_memory(self.mesh)) is not None:
            row["memory_gib"] = peak / 2**30
        if self.saver.last is not None:
            row["last_checkpoint"] = self.saver.last
        epochs = self.inputs.source.epochs(step * self.inputs.rows_a_step)
        row |= {f"epochs/{name}": count for name, count in epochs.items()}
        self.telemetry.write(step, row)
        self.reporter.row(step, row)

    def stopped_by(self, bad: BadSteps) -> ConfigError:
        """What to tell the user, once the save under way has ended."""
        self.saver.end_quietly()
        cfg = self.cfg
        spiky = " or were spikes" if cfg.train.on_spike == "skip" else ""
        good = [f"the last checkpoint before them is step {step}" for step in self.store.steps() if step < bad.first]
        rows = rows_of_step(self.inputs.source, bad.first, self.inputs.rows_a_step, cfg.train.seed)
        return ConfigError(
            f"steps {bad.first} to {bad.last} had no finite loss and gradients{spiky}, and were skipped; "
            f"the run stops here; {(good or ['there is no checkpoint before them'])[-1]}; step {bad.first} read {rows}; "
            f"look at them with {module_command('nash_mhc.data', 'inspect', str(self.inputs.folder), '--step', str(bad.first))}"
        )


def begin(
    inputs: Inputs,
    mesh: Mesh,
    store: Store,
    *,
    watch: Watch,
    reporter: Reporter,
    clock: WallClock,
    sinks: Sequence[Sink] = (),
    known: dict[str, Any],
) -> Session:
    """Compiles the step and, meanwhile, makes or restores the state; then writes the run's first files.

    `known`: what run.json says besides: settings as they were given, the command, expected memory and speed.
    """
    cfg, source = inputs.cfg, inputs.source
    reporter.wait_for("compiling the step ...")
    watch.doing("compiling")
    step_fn = compile_train_step(cfg, mesh, source, warn=reporter.say)
    shapes = sharded_abstract_state(cfg, mesh)
    compiled = step_fn.begin(shapes, inputs.abstract_batch(source, cfg.train.grad_accum, mesh))
    start = starting_state(cfg, mesh, store, reporter.say, lambda: warm_model(cfg, source, mesh, reporter.say))
    store.warm_up(saved_part(cfg, start.state))
    if start.own and "clock" in start.values:
        clock.go_on(start.values["clock"], written=inputs.folder.written(start.step), row=inputs.folder.last_row())
    changed = changed_settings.changes(start.before.config, cfg) if start.before is not None else {}
    wandb = from_leader(lambda: wandb_run(inputs))
    before = start.before.commands if start.own and start.before is not None else ()
    known = known | {
        "init_from": start.init_from,
        "history": changed_settings.added_to(start.history, changed, start.step),
        "wandb": wandb,
        "commands": [*before, *(text for text in known["commands"] if text not in before[-1:])],
    }
    about = described(cfg, mesh, inputs.floor, inputs.identity, start.state.model, known)
    texts: dict[str, str | bytes] = {**about, **_beside(start)}
    telemetry: Telemetry = Nowhere()
    if jax.process_index() == 0:
        others = [*sinks, *wandb_sink(inputs, wandb, reporter)]
        evaluated = start.step - _evaluation_missing(inputs, start)
        telemetry = _open_files(inputs, texts, evaluated, start.step, reporter, others)
    saver = Saver(
        store,
        texts,
        say=reporter.say,
        owner=inputs.owner,
        last=start.step if start.own else None,
        stopping=lambda: SIGNALS.caught is not None,
        make_room=lambda: remove_programs(inputs.folder.path),
    )
    with clock.during("compile"):
        evaluation = _begin_evaluation(inputs, mesh, shapes.model, compiled)
        compiled.result()
    where = " (an earlier start had compiled it)" if step_fn.from_cache else ""
    reporter.say(f"compiled in {step_fn.seconds:.1f} s{where}; starting from {start.origin}")
    for line in changed_settings.about(changed, cfg, int(start.state.step)):
        reporter.say(line)
    meter = Meter(
        cfg,
        flops_per_token(cfg),
        peak_flops(mesh, cfg.train.dtype),
        step=start.step,
        updates=int(start.state.step),
        saved=start.values,
    )
    samples = Samples(cfg, mesh, inputs.tokenizer, reporter.say)
    profile = _profile(inputs, start, step_fn, reporter)
    session = Session(
        inputs, mesh, start, step_fn, store, saver, telemetry, meter, reporter, watch, clock, samples, evaluation, profile
    )
    session.best = Best.of(start.values.get("best")) if start.own else Best()
    return session


def _begin_evaluation(inputs: Inputs, mesh: Mesh, model: Any, step: Program) -> Program | None:
    """Its program is not needed before some steps are done, and is compiled behind the first of them.

    But where several processes stop at the same point of their work, none may wait for its compiler in between.
    """
    if (evaluator := inputs.evaluator) is None:
        return None
    alone = jax.process_count() == 1
    batch = inputs.abstract_batch(evaluator.held_out, 1, mesh)
    program = evaluator.step.begin(model, batch, after=step if alone else None)
    if not alone:
        program.result()
    return program


def _beside(start: Start) -> dict[str, bytes]:
    """The small files of the Hugging Face model that the run began with, so that it can become one again."""
    began = (start.init_from or {}).get("folder")
    return contents_beside(Path(began)) if began is not None and not is_remote(began) else {}


def _evaluation_missing(inputs: Inputs, start: Start) -> bool:
    cfg = inputs.cfg
    return inputs.evaluator is not None and start.evaluation_missing(
        1 if start.step >= cfg.train.total_steps else cfg.train.eval_interval
    )


def _profile(inputs: Inputs, start: Start, step_fn: CompiledStep, reporter: Reporter) -> Profile | None:
    """Of the first process; those of a run in an object store lie where the runs of this machine have theirs."""
    if (steps := inputs.cfg.telemetry.profiled) is None or jax.process_index() > 0:
        return None
    first, last, total = *steps, inputs.cfg.train.total_steps
    if not start.step < first <= total:
        reporter.say(f"--profile {first}:{last}: this start takes steps {start.step + 1} to {total}; nothing is profiled")
        return None
    if (every := inputs.cfg.train.eval_interval) and (first - 1) // every != (last - 1) // every:
        reporter.say(f"--profile {first}:{last}: an evaluation lies within these steps, and is counted with them")
    folder = inputs.folder.path / "profile" if not is_remote(inputs.folder.path) else Path("runs") / "profile"
    return Profile(first, min(last, total), folder, step_fn.text, reporter.say)


def _open_files(
    inputs: Inputs, texts: dict[str, str | bytes], evaluated: int, step: int, reporter: Reporter, others: Sequence[Sink]
) -> Telemetry:
    """Writes what is known of the run; opens its rows, of which those after `step`, and evaluations after `evaluated`,
    go."""
    configuration = "".join(f"    {line}\n" for line in json.dumps(inputs.cfg.to_dict(), indent=2).splitlines())
    try:
        inputs.folder.write(texts)
        return Telemetry(
            inputs.folder.path,
            start_step=step,
            evaluated=evaluated,
            say=reporter.say,
            owner=inputs.owner,
            others=others,
            texts={"configuration": configuration},
        )
    except OSError as error:
        remedy = "make room there or choose another folder"
        raise ConfigError(f"--checkpoint-dir {inputs.folder}: cannot be written ({reason(error)}); {remedy}") from error
