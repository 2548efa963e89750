"""One training run, from its configuration to its end. Read this file first, then step.py and state.py.

In order: `run` opens mesh and data, `Trainer.__init__` compiles the step, restores the state and opens the files,
`Trainer.train` takes the steps (`Trainer._loop`) and ends the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import RunConfig
from nash_mhc.estimate.preflight import preflight
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.board import from_leader
from nash_mhc.runtime.compiled import remove_programs, use_compilation_cache
from nash_mhc.runtime.hardware import peak_flops
from nash_mhc.runtime.profile import disable_command_buffers
from nash_mhc.runtime.signals import SIGNALS, Interrupted
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.files import Folder
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train.callbacks import Callback, profile_callback
from nash_mhc.train.device_batches import host_batches, prefetched
from nash_mhc.train.devices import join, resolve
from nash_mhc.train.evaluate import Best, Evaluations
from nash_mhc.train.final_result import finish, record_answers
from nash_mhc.train.inputs import Inputs, open_inputs
from nash_mhc.train.log import BadSteps, StepLog, bad_steps_error, data_lines, device_lines, first_lines, make_reporter
from nash_mhc.train.meter import Meter
from nash_mhc.train.programs import compile_train_step
from nash_mhc.train.resume import checkpoint_values, starting_state
from nash_mhc.train.run_record import change_lines, open_telemetry, record_run
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import TrainState, saved_part, sharded_abstract_state
from nash_mhc.train.warm_start import warm_model


@dataclass(frozen=True)
class Result:
    """What a run leaves: the run directory, the final state, the last evaluation and its sample."""

    folder: Folder
    state: TrainState
    evaluation: dict[str, float]
    floor: tuple[float, float] | None  # nats/token, bits/byte; None if the data does not know it
    sample: str | None = None  # what the model wrote at its last evaluation


def run(
    cfg: RunConfig,
    *,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
    insist: bool = False,
    command: str | None = None,
    opened: Callable[[str], None] = lambda _: None,
) -> Result:
    """Train to the end of `cfg` and return the result; ConfigError for what the user must change.

    Interrupted when a signal stops the run, with its last step saved: the same call resumes it.

    callbacks: called at every step, evaluation and save (`Callback`). sinks: get the rows of metrics and evaluations
    that the run's files get, in the first process. insist: train even if memory is not expected to suffice. command:
    what was typed, for run.json. opened: called with the run directory once this run holds its lock.
    """
    clock = WallClock(SIGNALS.process_start_time())
    if cfg.telemetry.profiled is not None:
        disable_command_buffers()
    asked = cfg
    join(asked)  # the other processes, if there are any
    cfg, mesh = resolve(asked)  # fills in what depends on the devices
    with Watch(stall_timeout=cfg.train.stall_timeout) as watch, contextlib.ExitStack() as stack:
        reporter = make_reporter(cfg.telemetry.log_format, cfg.train.total_steps, quiet=quiet or jax.process_index() > 0)
        stack.callback(reporter.end)
        for line in device_lines(asked.mesh, cfg.mesh, cfg.data.batch_size, cfg.optim.learning_rate):
            reporter.say(line)
        expected = from_leader(lambda: preflight(cfg, mesh, reporter.say, insist=insist))

        # Data and run directory: what does not fit is refused here, before anything is written.
        inputs = open_inputs(cfg, mesh, watch, stack, reporter.say)
        cfg = inputs.cfg
        opened(str(inputs.folder))
        use_compilation_cache(inputs.folder.path)
        reporter.floor, reporter.total = inputs.floor[0] if inputs.floor else None, cfg.train.total_steps
        for line in first_lines(inputs, mesh):
            reporter.say(line)

        about = {"settings": asked.to_dict(), "commands": [command] if command else [], "expected": expected}
        with Store(inputs.folder.path, keep=cfg.train.keep_last, keep_every=cfg.train.keep_every) as store:
            trainer = Trainer(inputs, mesh, store, about, watch=watch, clock=clock, reporter=reporter, sinks=sinks)
            trainer.callbacks = [*callbacks, *trainer.callbacks]
            state = trainer.train()
    evaluations = trainer.evaluations
    return Result(inputs.folder.path, state, evaluations.values | trainer.test_score, inputs.floor, evaluations.sample)


class Trainer:
    """A run in progress. Callbacks get it: see `TrainingRun` for what they may use."""

    def __init__(
        self,
        inputs: Inputs,
        mesh: Mesh,
        store: Store,
        about: dict[str, Any],
        *,
        watch: Watch,
        clock: WallClock,
        reporter: Reporter,
        sinks: Sequence[Sink],
    ) -> None:
        """Compile the step and, meanwhile, create or restore the state; then write the run's first files.

        `about` goes into run.json: settings as given, the command, expected memory and speed.
        """
        self.inputs, self.mesh, self.store = inputs, mesh, store
        self.watch, self.clock, self.reporter = watch, clock, reporter
        cfg, say = inputs.cfg, reporter.say
        self.cfg, self.folder, self.say = cfg, inputs.folder, say
        reporter.wait_for("compiling the step ...")
        watch.set_phase("compiling")
        self.step_fn = compile_train_step(cfg, mesh, inputs.source, warn=say)
        shapes = sharded_abstract_state(cfg, mesh)
        compiling = self.step_fn.compile_in_background(shapes, inputs.abstract_batch(inputs.source, cfg.train.grad_accum, mesh))
        self.start = start = starting_state(cfg, mesh, store, say, lambda: warm_model(cfg, inputs.source, mesh, say))
        self.state, self.step = start.state, start.step
        store.warm_up(saved_part(cfg, start.state))
        if start.own and "clock" in start.values:
            clock.resume(start.values["clock"], written=self.folder.completed_at(start.step), row=self.folder.last_row())

        record = record_run(inputs, mesh, start, about)
        self.repeats_evaluation = inputs.evaluator is not None and start.evaluation_missing(cfg.train)
        evaluated = start.step - self.repeats_evaluation
        self.telemetry = open_telemetry(inputs, record, evaluated=evaluated, step=start.step, sinks=sinks, reporter=reporter)
        self.saver = Saver(
            store, record.texts, say=say, owner=inputs.owner, last=start.step if start.own else None,
            stopping=lambda: SIGNALS.caught is not None, free_space=lambda: remove_programs(self.folder.path),
        )  # fmt: skip
        with clock.during("compile"):
            if (evaluator := inputs.evaluator) is not None:
                evaluator.compile(shapes.model, inputs.abstract_batch(evaluator.held_out, 1, mesh), after=compiling)
            compiling.result()
        cached = " (an earlier start had compiled it)" if self.step_fn.from_cache else ""
        say(f"compiled in {self.step_fn.seconds:.1f} s{cached}; starting from {start.origin}")
        for line in change_lines(record.changed, cfg.to_dict(), int(start.state.step)):
            say(line)

        self.meter = Meter(
            slots=cfg.data.seq_len * inputs.rows_a_step, flops_per_token=flops_per_token(cfg),
            peak_flops=peak_flops(mesh, cfg.train.dtype), step=start.step, updates=int(start.state.step), saved=start.values,
        )  # fmt: skip
        samples = Samples(cfg.telemetry, cfg.model, mesh, inputs.tokenizer, say, cfg.data.seq_len, cfg.train.dtype)
        self.evaluations = Evaluations(
            inputs.evaluator, samples, Best.of(start.values.get("best") if start.own else None), floor=inputs.floor,
            watch=watch, clock=clock, reporter=reporter, telemetry=self.telemetry,
        )  # fmt: skip
        log = StepLog(inputs, mesh, self.meter, reporter=reporter, telemetry=self.telemetry, clock=clock, saver=self.saver)
        profile = profile_callback(inputs, start.step, self.step_fn, self.meter.exclude, say)
        self.callbacks: list[Callback] = [log, *profile]
        self.test_score: dict[str, float] = {}
        self._pending: tuple[int, Any] | None = None  # the newest step, and its metrics on the device
        self._saved_step, self._save_requested, self._stop_reason = -1, False, ""

    def train(self) -> TrainState:
        """Take all steps, save the last one and return the final state; Interrupted once a signal stopped the run."""
        cfg, start, store, say = self.cfg, self.start, self.store, self.say
        span: dict[str, int] = {"start_step": start.step, "stop_step": max(start.step, cfg.train.total_steps)}
        source, accum = self.inputs.source, cfg.train.grad_accum
        rows = host_batches(cfg.data, source, self.mesh, grad_accum=accum, seed=cfg.train.seed, **span)
        feed = prefetched(rows, self.mesh, self.inputs.teachers.reader(source))
        for line in data_lines(self.inputs):
            say(line)
        self.reporter.begin(start.step)
        try:
            with SIGNALS.at_work():
                self.notify("on_begin")
                if self.step >= cfg.train.total_steps or self.out_of_patience:
                    longer = "--epochs" if cfg.train.epochs is not None else "--total-steps"
                    more = "--patience" if self.out_of_patience else longer
                    say(f"all {self.step} steps are done already; raise {more} to train on")
                    self.evaluate(write_row=not start.own or self.repeats_evaluation)
                else:
                    if self.step == 0:
                        record_answers(self.inputs, self.evaluations, self.state)
                    if self.repeats_evaluation:
                        self.evaluate()
                    self._loop(feed)
                if self.step > start.step or not store.steps():  # a run resumed from another directory has no checkpoint yet
                    self.save(wait=True)
                if self.out_of_patience and self.step < cfg.train.total_steps:
                    best = self.evaluations.best
                    self._stop_reason = f"{best.since} evaluations were no better than that of step {best.step} (--patience)"
                if SIGNALS.caught is not None or (self.step < cfg.train.total_steps and not self._stop_reason):
                    raise Interrupted(self.step, str(self.folder))
                if self._stop_reason:
                    say(f"the run ends at step {self.step}: {self._stop_reason}")
                state, self.test_score = finish(self.inputs, self.mesh, store, self.evaluations, self.state, self.step, say)
        except BadSteps as bad:
            self.saver.wait_quietly()
            raise bad_steps_error(bad, self.inputs, store) from None
        finally:
            self.reporter.end()
            feed.close()  # type: ignore[attr-defined]
            rows.close()  # type: ignore[attr-defined]
            self.telemetry.close()
            self.notify("on_end")
        return state

    def _loop(self, feed: Iterator[Batch]) -> None:
        """Take steps until the last one, or until a signal, patience or a callback stops the run.

        The host dispatches a step, then reads the metrics of the step before; it never waits for the newest step.
        """
        cfg, meter, watch, clock = self.cfg.train, self.meter, self.watch, self.clock
        due = lambda interval: self.step == cfg.total_steps or (interval > 0 and self.step % interval == 0)
        meter.reset()
        # Transfers in here are explicit; an accidental one (a stray float(), a numpy argument) is an error.
        with jax.transfer_guard("disallow"):
            while self.step < cfg.total_steps:
                step = self.step + 1
                watch.set_phase(f"reading the rows of step {step}", working=True)
                if watch.should_stop() or self._stop_reason:
                    break
                asked = time.perf_counter()
                clock.enter("input")
                batch = next(feed)
                clock.enter("step")
                meter.data_wait += time.perf_counter() - asked
                watch.set_phase(f"step {step}", working=True)
                self.notify("before_step")
                self.state, metrics = self.step_fn(self.state, batch)
                self.step = step
                self.notify("after_step")
                self._read_pending()
                self._pending = step, metrics
                to_save = self.saver.retry_due() or self._save_requested or due(cfg.checkpoint_interval)
                to_evaluate = due(cfg.eval_interval)
                if to_evaluate or to_save:
                    self._read_pending()
                    paused = time.perf_counter()
                    if to_evaluate:
                        self.evaluate()
                        to_save |= self.cfg.ends_with_best and self.evaluations.best.step == step
                    if to_save:  # after the evaluation, which the checkpoint holds
                        began = time.perf_counter()
                        self.save()
                        meter.saving += time.perf_counter() - began
                    meter.exclude(time.perf_counter() - paused)
                    if to_evaluate and self.out_of_patience:
                        break
            self._read_pending()

    def _read_pending(self) -> None:
        """Read the metrics of the newest step once it has finished; BadSteps after too many without an update."""
        if self._pending is not None:
            (step, on_device), self._pending = self._pending, None
            metrics = jax.device_get(on_device)
            self.meter.add(step, metrics)
            self.reporter.advance(step)
            self.notify("on_step", step, metrics)

    def evaluate(self, *, write_row: bool = True) -> None:
        """Evaluate on held-out text, if there is any, and write a sample; a signal breaks it off."""
        if self.evaluations.evaluate(self.state, self.step, self.meter.inside, write_row=write_row):
            self.notify("on_evaluation", self.step, self.evaluations.values)
        elif self.inputs.evaluator is None and self.step >= self.cfg.train.total_steps:
            self.evaluations.sample = self.evaluations.samples.write(self.state.best_model)

    def save(self, *, wait: bool = False) -> None:
        """Begin to save the state; with `wait`, return when the checkpoint is complete."""
        self._save_requested = False
        self.watch.set_phase(f"saving step {self.step}")  # not `working`: storage may take as long as it likes
        evaluations = self.evaluations
        counted = self.meter.to_json() | {"clock": self.clock.to_json(), "best": evaluations.best.to_json()}
        with self.clock.during("checkpoint"), jax.transfer_guard("allow"):  # Orbax copies to the host in its own way
            values = checkpoint_values(
                self.cfg.to_dict(), self.step, rows=self.inputs.identity, counted=counted, metrics=self.meter.last,
                evaluation=dict(evaluations.values) if evaluations.step == self.step else None,
                base=self.start.init_from if self.cfg.lora.rank else None,
            )  # fmt: skip
            self.saver.save(saved_part(self.cfg, self.state), self.step, values, wait=wait)
        if self._saved_step != self.step:  # the last step is saved in the loop, then waited for
            self._saved_step = self.step
            self.notify("on_save", self.step)

    def notify(self, event: str, *args: Any) -> None:
        """Call this event of every callback."""
        with jax.transfer_guard("allow"):
            for callback in self.callbacks:
                getattr(callback, event)(self, *args)

    # --- what callbacks may use, beside the fields -------------------------------------------------------------------

    @property
    def model(self) -> Any:
        return self.state.best_model

    @property
    def out_of_patience(self) -> bool:
        """Whether as many evaluations as --patience were no better than the best."""
        return 0 < self.cfg.train.patience <= self.evaluations.best.since

    def request_save(self) -> None:
        self._save_requested = True

    def request_stop(self, reason: str) -> None:
        self._stop_reason = reason
