"""One run, from its configuration to its end. Read this file, then session.py and loop.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.store import Store
from nash_mhc.config.schema import RunConfig
from nash_mhc.data.mixture import passes
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.model.quantized import counted
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.board import from_leader
from nash_mhc.parallel.mesh import describe
from nash_mhc.parallel.place import unread_variables
from nash_mhc.runtime.profile import show_kernels
from nash_mhc.runtime.program_cache import use_compilation_cache
from nash_mhc.runtime.signals import SIGNALS, Interrupted
from nash_mhc.runtime.watchdog import Watch
from nash_mhc.storage.paths import Folder
from nash_mhc.telemetry.live_panel import LivePanel
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.terminal import JsonReporter, Reporter, is_terminal
from nash_mhc.telemetry.wall_clock import WallClock
from nash_mhc.train.device_batches import host_batches, prefetched
from nash_mhc.train.fit.preflight import preflight
from nash_mhc.train.inputs import Inputs, open_inputs
from nash_mhc.train.loop import train_loop
from nash_mhc.train.outcome import ask_before, finish
from nash_mhc.train.resolve_devices import resolve
from nash_mhc.train.same_everywhere import join
from nash_mhc.train.session import BadSteps, Session, begin
from nash_mhc.train.state import TrainState, abstract_state

_MOST_RATE = 0.1  # ten times the largest that any preset or recipe has


@dataclass(frozen=True)
class Result:
    """What a run leaves: the folder, the final state, the last evaluation and what was written at it."""

    folder: Folder
    state: TrainState
    evaluation: dict[str, float]
    floor: tuple[float, float] | None  # nats a token, bits a byte; None where the data does not know it
    sample: str | None = None  # what the model wrote at its last evaluation


def run(
    cfg: RunConfig,
    *,
    quiet: bool = False,
    each_step: Callable[[int], None] | None = None,
    sinks: Sequence[Sink] = (),
    insist: bool = False,
    command: str | None = None,
    opened: Callable[[str], None] = lambda _: None,
) -> Result:
    """Trains to the end of `cfg` and returns what came out; ConfigError for what the user must change.

    Interrupted when a signal has stopped it, with its last step saved: the same call goes on from there. `each_step` is
    called with the number of each step that has finished, while the next one runs. `sinks` get the rows of metrics and
    evaluations, as the run's own files do; of several processes, those of the first. `insist`: begin even what is not
    expected to fit the devices. `command`: what was typed to start it, for run.json. `opened` is
    called with the run's folder, once it is this run's.
    """
    clock = WallClock(SIGNALS.began_with_process())
    if cfg.telemetry.profiled is not None:
        show_kernels()
    asked = cfg
    join(cfg)
    cfg, mesh = resolve(cfg)
    with Watch(stall_timeout=cfg.train.stall_timeout) as watch, contextlib.ExitStack() as held:
        quiet = quiet or jax.process_index() > 0
        reporter = _reporter(cfg, quiet, each_step)
        held.callback(reporter.end)
        if cfg.mesh.profile_for is not None:
            suits = f"--batch-size {cfg.data.batch_size} --learning-rate {cfg.optim.learning_rate:g}"
            reporter.say(f"--profile-for {cfg.mesh.profile_for}: {suits}")
        for line in unread_variables(asked.mesh, os.environ):
            reporter.say(line)
        if "," in asked.mesh.platform:
            reporter.say(f"--platform {asked.mesh.platform}: {cfg.mesh.platform} is taken")
        expected = from_leader(lambda: preflight(cfg, mesh, reporter.say, insist=insist))
        inputs = open_inputs(cfg, mesh, watch, held, reporter.say)
        opened(str(inputs.folder))
        use_compilation_cache(inputs.folder.path)
        _introduce(inputs, mesh, reporter)
        with Store(inputs.folder.path, keep=cfg.train.keep_last, keep_every=cfg.train.keep_every) as store:
            known = {"settings": asked.to_dict(), "commands": [command] if command else [], "expected": expected}
            session = begin(inputs, mesh, store, watch=watch, reporter=reporter, clock=clock, sinks=sinks, known=known)
            state = _train(session)
    return Result(inputs.folder.path, state, dict(session.evaluation), inputs.floor, session.sample)


def _reporter(cfg: RunConfig, quiet: bool, each_step: Callable[[int], None] | None) -> Reporter:
    if cfg.telemetry.log_format == "json":
        return JsonReporter(quiet=quiet, each_step=each_step)
    kind = LivePanel if is_terminal() and not quiet else Reporter
    return kind(cfg.train.total_steps, None, quiet=quiet, each_step=each_step)


def _train(session: Session) -> TrainState:
    """From the session's start to the last step, which is saved; Interrupted, once the newest step is saved."""
    cfg, inputs, start, reporter = session.cfg, session.inputs, session.start, session.reporter
    steps: dict[str, int] = {"start_step": start.step, "stop_step": max(start.step, cfg.train.total_steps)}
    rows = host_batches(cfg.data, inputs.source, session.mesh, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed, **steps)
    feed = prefetched(rows, session.mesh, inputs.teachers.reader(inputs.source))
    if read := passes(inputs.source.epochs(cfg.train.total_steps * inputs.rows_a_step)):
        reporter.say(f"the run {read}")
    reporter.begin(start.step)
    state, step = start.state, start.step
    try:
        with SIGNALS.at_work():
            if session.done:
                longer = "--epochs" if cfg.train.epochs is not None else "--total-steps"
                more = "--patience" if session.has_waited_enough else longer
                reporter.say(f"all {start.step} steps are done already; raise {more} to train on")
                session.evaluate(state, step, write_row=not start.own or session.begins_with_evaluation)
            else:
                ask_before(session, state)
                if session.begins_with_evaluation:
                    session.evaluate(state, step)
                state, step = train_loop(session, state, feed)
            if step > start.step or not session.store.steps():  # what came from another folder shall stand in this one, too
                session.save(state, step, wait=True)
            if SIGNALS.caught is not None or (step < cfg.train.total_steps and not session.has_waited_enough):
                raise Interrupted(step, str(inputs.folder))
            if step < cfg.train.total_steps:
                waited = f"{session.best.since} evaluations were no better than that of step {session.best.step}"
                reporter.say(f"the run ends at step {step}: {waited} (--patience)")
            state = finish(session, state, step)
    except BadSteps as bad:
        raise session.stopped_by(bad) from None
    finally:
        reporter.end()
        feed.close()  # type: ignore[attr-defined]
        rows.close()  # type: ignore[attr-defined]
        session.telemetry.close()
        if session.profile is not None:
            session.profile.close()
    return state


def _introduce(inputs: Inputs, mesh: Mesh, reporter: Reporter) -> None:
    """The first lines of a run: on what, how large, where, which data, and what it is measured by."""
    cfg = inputs.cfg
    reporter.floor, reporter.total = inputs.floor[0] if inputs.floor else None, cfg.train.total_steps
    reporter.say(f"{describe(mesh)}, {cfg.train.dtype}; {_parameters(cfg)}; run in {inputs.folder}")
    if cfg.optim.optimizer in ("adamw", "adam_atan2", "muon") and cfg.optim.learning_rate > _MOST_RATE:
        reporter.say(
            f"warning: --learning-rate {cfg.optim.learning_rate:g} is far above what trains (1e-4 to 1e-2): the loss will rise"
        )
    for line in inputs.in_words(mesh):
        reporter.say(line)
    if inputs.evaluator is None:
        reporter.say(f"no text is held out of {cfg.data.dataset}: nothing is evaluated")
    elif inputs.source.held_out:
        reporter.say(inputs.source.held_out)


def _parameters(cfg: RunConfig) -> str:
    text = f"{count_parameters(cfg.model):,} parameters"
    if (drawn := architecture_of(cfg.model).drawn(cfg.model)) is not None:
        text += f", and {drawn.numbers:,} numbers from seed {drawn.seed} that nobody trains"
    model = abstract_state(cfg).model
    if few := counted(model):
        text += "".join(f", {count:,} of them of {bits} bits" for bits, count in sorted(few.items()))
    trained, frozen = Training.of(cfg).split(model)
    if not jax.tree.leaves(frozen):
        return text
    count = f"{sum(leaf.size for leaf in jax.tree.leaves(trained)):,}"
    return f"{text}, and {count} of adapters, which are trained" if cfg.lora.rank else f"{text}; {count} are trained"
