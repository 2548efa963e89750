"""One training run, from its configuration to its result. Read this file first, then step.py and state.py.

`run` opens the mesh, the data and the run directory. `Trainer.__init__` compiles the step and restores the state.
`Trainer.train` takes the steps (`_loop`), saves the last one and evaluates the result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.saving import Saver
from nash_mhc.checkpoint.store import Store
from nash_mhc.config import logs
from nash_mhc.config.schema import RunConfig
from nash_mhc.estimate.preflight import preflight
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.board import from_leader
from nash_mhc.runtime.compiled import remove_programs, use_compilation_cache
from nash_mhc.runtime.hardware import peak_flops
from nash_mhc.runtime.signals import SIGNALS, Interrupted
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.files import Folder
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train import run_record
from nash_mhc.train.callbacks import Callback, Meter, StepLog, profile_callback
from nash_mhc.train.device_batches import host_batches, prefetched
from nash_mhc.train.evaluate import Best, Evaluations
from nash_mhc.train.inputs import Inputs, join, open_inputs, resolve, with_remat_of_leader
from nash_mhc.train.resume import checkpoint_values, starting_state
from nash_mhc.train.samples import Samples
from nash_mhc.train.state import TrainState, saved_part, sharded_abstract_state
from nash_mhc.train.step import compile_train_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The result of a run: its directory, its final state and its last evaluation."""

    folder: Folder
    state: TrainState
    evaluation: dict[str, float]
    floor: tuple[float, float] | None  # lowest possible loss: nats/token, bits/byte; None if unknown
    sample: str | None = None  # text that the model generated at its last evaluation


def run(
    cfg: RunConfig,
    *,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
    no_preflight: bool = False,
    command: str | None = None,
    on_open: Callable[[str], None] = lambda _: None,
) -> Result:
    """Train until the last step of `cfg` and return the result. Print progress, unless `quiet` or the caller's own
    logging handlers print it to the console.

    Raise ConfigError for invalid settings. Raise Interrupted if a signal stops the run: its last step is saved, and the
    same call resumes it.

    callbacks: called at every step, evaluation and save. sinks: receive metrics and evaluations in process 0.
    no_preflight: train even if the memory estimate exceeds the devices. command: the command line, for run.json.
    on_open: called with the run directory once this run holds its lock.
    """
    clock = WallClock(SIGNALS.process_start_time())
    join(cfg)  # the other processes, if there are any
    requested, (cfg, mesh) = cfg, resolve(cfg)  # `auto` settings are resolved, and the mesh is made
    with Watch(stall_timeout=cfg.train.stall_timeout) as watch, contextlib.ExitStack() as stack:
        shown = not quiet and jax.process_index() == 0 and not logs.caller_prints()
        reporter = run_record.make_reporter(cfg.telemetry, cfg.train.total_steps, shown=shown)
        stack.enter_context(logs.showing(reporter if shown else None, cfg.telemetry.log_level))
        stack.callback(reporter.end)
        run_record.describe_devices(requested.mesh, cfg.mesh, cfg.data.batch_size, cfg.optim.learning_rate)
        cfg = with_remat_of_leader(cfg)
        estimate = from_leader(lambda: preflight(cfg, mesh, no_preflight=no_preflight))  # process 0 decides for all

        # Data and run directory. Settings that do not fit are rejected here, before anything is written.
        inputs = open_inputs(cfg, mesh, watch, stack)
        cfg = inputs.cfg  # with the run directory, and steps for --epochs
        on_open(str(inputs.folder))
        use_compilation_cache(inputs.folder.path)
        reporter.floor, reporter.total = inputs.floor[0] if inputs.floor else None, cfg.train.total_steps
        run_record.describe_run(inputs, mesh)

        # Program, state and steps.
        invocation = {"settings": requested.recorded(), "commands": [command] if command else [], "expected": estimate}
        with Store(inputs.folder.path, keep=cfg.train.keep_last, keep_every=cfg.train.keep_every) as store:
            trainer = Trainer(inputs, mesh, store, invocation, watch=watch, clock=clock, reporter=reporter, sinks=sinks)
            trainer.callbacks = [*callbacks, *trainer.callbacks]
            return trainer.train()


class Trainer:
    """A run in progress. Callbacks receive it; `TrainingRun` (callbacks.py) lists what they may use."""

    def __init__(
        self,
        inputs: Inputs,
        mesh: Mesh,
        store: Store,
        invocation: dict[str, Any],
        *,
        watch: Watch,
        clock: WallClock,
        reporter: Reporter,
        sinks: Sequence[Sink],
    ) -> None:
        """Compile the step while the state is created or restored, then open the run's files. `invocation` goes into
        run.json: the requested settings, the command, and the memory and speed estimate."""
        self.inputs, self.mesh, self.store = inputs, mesh, store
        self.watch, self.clock, self.reporter = watch, clock, reporter
        cfg = inputs.cfg
        self.cfg, self.folder, self.log = cfg, inputs.folder, log

        # Compile in the background; meanwhile create or restore the state.
        reporter.wait_for("compiling the step ...")
        watch.set_phase("compiling")
        self.step_fn = compile_train_step(cfg, mesh, inputs.source)
        shapes = sharded_abstract_state(cfg, mesh)
        compiling = self.step_fn.compile_in_background(shapes, inputs.abstract_batch(inputs.source, cfg.train.grad_accum, mesh))
        self.start = start = starting_state(cfg, mesh, store, inputs.source)
        self.state, self.step = start.state, start.step  # `state.step` counts updates only, without skipped steps
        store.warm_up(saved_part(start.state, cfg.lora))
        if start.own and "clock" in start.values:  # own: the checkpoint is this run's, not that of --resume-from
            clock.resume(start.values["clock"], written=self.folder.completed_at(start.step), row=self.folder.last_row())

        # Write run.json, open metrics.jsonl and eval.jsonl.
        record = run_record.record(inputs, mesh, start, invocation)
        self.repeats_evaluation = inputs.evaluator is not None and start.evaluation_missing(cfg.train)
        evaluated = start.step - 1 if self.repeats_evaluation else start.step  # one to repeat gets a new row
        self.telemetry = run_record.open_telemetry(inputs, record, evaluated=evaluated, step=start.step, sinks=sinks)
        self.saver = Saver(
            store, record.texts, owner=inputs.owner, last=start.step if start.own else None,
            stopping=lambda: SIGNALS.caught is not None, free_space=lambda: remove_programs(self.folder.path),
        )  # fmt: skip

        with clock.during("compile"):
            if (evaluator := inputs.evaluator) is not None:
                evaluator.compile(shapes.model, inputs.abstract_batch(evaluator.held_out, 1, mesh), after=compiling)
            compiling.result()
        cached = " (cache hit)" if self.step_fn.from_cache else ""
        log.info(f"compiled in {self.step_fn.seconds:.1f} s{cached}; starting from {start.origin}")
        run_record.describe_changes(record.changed, cfg.to_dict(), int(start.state.step))

        self.meter = Meter(
            tokens_per_step=cfg.data.seq_len * inputs.sequences_per_step, flops_per_token=flops_per_token(cfg),
            peak_flops=peak_flops(mesh, cfg.train.dtype), step=start.step, updates=int(start.state.step), saved=start.values,
        )  # fmt: skip
        samples = Samples(cfg.telemetry, cfg.model, mesh, inputs.tokenizer, cfg.data.seq_len, cfg.train.dtype)
        self.evaluations = Evaluations(
            inputs.evaluator, inputs.test, cfg.train.total_steps, samples,
            Best.of(start.values.get("best") if start.own else None), folder=self.folder, floor=inputs.floor,
            watch=watch, clock=clock, reporter=reporter, telemetry=self.telemetry,
        )  # fmt: skip
        self.callbacks: list[Callback] = [StepLog(inputs, mesh, self.meter, reporter, self.telemetry, clock, self.saver)]
        self.callbacks += profile_callback(cfg.telemetry, cfg.train, self.folder, start.step, self.step_fn, self.meter.exclude)
        self._pending: tuple[int, Any] | None = None  # a dispatched step whose metrics are still on the device
        self._saved_step, self._save_requested, self._stop_reason = -1, False, ""

    def train(self) -> Result:
        """Take the remaining steps, save, and return the result; raise Interrupted if a signal stops the run."""
        cfg, start, source = self.cfg, self.start, self.inputs.source
        span: dict[str, int] = {"start_step": start.step, "stop_step": max(start.step, cfg.train.total_steps)}
        rows = host_batches(cfg.data, source, self.mesh, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed, **span)
        add_fields = self.inputs.feed.reader(source)
        # Fields such as a teacher's logits are added when a batch is yielded, so with the current model.
        batches = prefetched(rows, self.mesh, lambda batch: add_fields(self.state.model, batch))
        run_record.describe_epochs(self.inputs)
        self.reporter.begin(start.step)
        try:
            with contextlib.closing(rows), contextlib.closing(batches), SIGNALS.at_work():
                self.notify("on_begin")
                if self.step >= cfg.train.total_steps or self.out_of_patience:
                    longer = "--total-steps" if cfg.train.epochs is None else "--epochs"
                    flag = "--patience" if self.out_of_patience else longer
                    log.info(f"all {self.step} steps are already done; raise {flag} to continue")
                    self.evaluate(write_row=not start.own or self.repeats_evaluation)
                else:
                    if self.step == 0:
                        self.evaluations.record_answers(self.state, self.inputs.tokenizer)
                    if self.repeats_evaluation:
                        self.evaluate()
                    self._loop(batches)
                if self.step > start.step or not self.store.steps():  # --resume-from: no checkpoint in this directory yet
                    self.save(wait=True)
                return self._finish()
        finally:
            self.reporter.end()
            self.telemetry.close()
            self.notify("on_end")

    def _loop(self, batches: Iterator[Batch]) -> None:
        """Take steps until the last one, or until a signal, --patience or a callback stops the run.

        The host dispatches a step, then reads the metrics of the previous one; it never waits for the latest step.
        """
        train, meter, watch, clock = self.cfg.train, self.meter, self.watch, self.clock
        due = lambda interval: self.step == train.total_steps or (interval > 0 and self.step % interval == 0)
        meter.reset()
        # An implicit transfer in here (a stray float(), a numpy argument) is an error.
        with jax.transfer_guard("disallow"):
            while self.step < train.total_steps:
                step = self.step + 1
                watch.set_phase(f"reading the batch of step {step}", working=True)
                if watch.should_stop() or self._stop_reason:  # after a signal, all processes stop at the same step
                    break
                waiting_since = time.perf_counter()
                clock.enter("input")
                batch = next(batches)
                clock.enter("step")
                meter.data_wait += time.perf_counter() - waiting_since

                watch.set_phase(f"step {step}", working=True)
                self.notify("before_step")
                self.state, metrics = self.step_fn(self.state, batch)  # hyperparameters are bound to it
                self.step = step
                self.notify("after_step")
                self._read_pending()
                self._pending = step, metrics

                to_save = self.saver.retry_due() or self._save_requested or due(train.checkpoint_interval)
                to_evaluate = due(train.eval_interval)
                if to_evaluate or to_save:
                    self._read_pending()
                    paused = time.perf_counter()
                    if to_evaluate:
                        self.evaluate()
                        to_save |= self.cfg.ends_with_best and self.evaluations.best.step == step
                    if to_save:  # after the evaluation, which the checkpoint contains
                        save_began = time.perf_counter()
                        self.save()
                        meter.saving += time.perf_counter() - save_began
                    meter.exclude(time.perf_counter() - paused)
                    if to_evaluate and self.out_of_patience:
                        break
            self._read_pending()

    def _read_pending(self) -> None:
        """Read the metrics of the pending step (in `_loop`, the one before the latest); let callbacks see them."""
        if self._pending is not None:
            (step, on_device), self._pending = self._pending, None
            metrics = jax.device_get(on_device)
            self.meter.add(step, metrics)
            self.reporter.advance(step)
            self.notify("on_step", step, metrics)

    def evaluate(self, *, write_row: bool = True) -> None:
        """Compute the held-out loss, if there is held-out data, and write a sample; a signal interrupts it."""
        if self.evaluations.evaluate(self.state, self.step, self.meter.arrays, write_row=write_row):
            self.notify("on_evaluation", self.step, self.evaluations.values)

    def save(self, *, wait: bool = False) -> None:
        """Start to save the state; with `wait`, return when the checkpoint is complete."""
        self._save_requested = False
        self.watch.set_phase(f"saving step {self.step}")  # not `working`: slow storage is no stall
        evaluations = self.evaluations
        counts = self.meter.to_json() | {"clock": self.clock.to_json(), "best": evaluations.best.to_json()}
        with self.clock.during("checkpoint"), jax.transfer_guard("allow"):  # Orbax's copies to the host are implicit
            values = checkpoint_values(
                self.cfg.recorded(), self.step, rows=self.inputs.identity, counts=counts, metrics=self.meter.last,
                evaluation=dict(evaluations.values) if evaluations.step == self.step else None,
                base=self.start.init_from if self.cfg.lora.rank else None,
            )  # fmt: skip
            self.saver.save(saved_part(self.state, self.cfg.lora), self.step, values, wait=wait)
        if self._saved_step != self.step:  # `train` saves the last step again, to wait for it
            self._saved_step = self.step
            self.notify("on_save", self.step)

    def _finish(self) -> Result:
        """Load the best checkpoint if the run ends with it, and compute the test score; Interrupted after a signal."""
        cfg, evaluations, is_short = self.cfg, self.evaluations, self.step < self.cfg.train.total_steps
        if is_short and self.out_of_patience:
            best = evaluations.best
            self._stop_reason = f"no better evaluation in {best.since} after step {best.step} (--patience)"
        if self.watch.should_stop() or (is_short and not self._stop_reason):
            raise Interrupted(self.step, str(self.folder))
        if self._stop_reason:
            log.info(f"the run ends at step {self.step}: {self._stop_reason}")
        state, step = self.state, self.step
        if cfg.ends_with_best:
            like = sharded_abstract_state(cfg, self.mesh)
            state, step = evaluations.load_best(self.store, like, state, step, has_adapters=cfg.lora.rank > 0)
        scores = evaluations.values | evaluations.finish(state, step)
        return Result(self.folder.path, state, scores, self.inputs.floor, evaluations.sample)

    def notify(self, event: str, *args: Any) -> None:
        """Call this event of every callback."""
        with jax.transfer_guard("allow"):
            for callback in self.callbacks:
                getattr(callback, event)(self, *args)

    @property
    def model(self) -> Any:
        """The model with averaged weights if the run has --ema-decay, else the trained model."""
        return self.state.averaged_model

    @property
    def out_of_patience(self) -> bool:
        """Whether --patience evaluations in a row were no better than the best."""
        return 0 < self.cfg.train.patience <= self.evaluations.best.since

    def request_save(self) -> None:
        self._save_requested = True

    def request_stop(self, reason: str) -> None:
        self._stop_reason = reason
