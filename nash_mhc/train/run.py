"""One run from its configuration: mesh, state, data, compiled step, loop, files."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc.checkpoint.faults import one_line
from nash_mhc.checkpoint.folders import exists
from nash_mhc.checkpoint.ownership import Owner, accompany, hold
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.places import Folder, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.inspection import rows_of_step
from nash_mhc.data.mixture import passes
from nash_mhc.data.sources import loss_floor, open_held_out, open_source
from nash_mhc.data.tokens import load_tokenizer
from nash_mhc.model.architectures import architecture_of, count_parameters
from nash_mhc.ops.attend import best_kernel, why_not
from nash_mhc.optim.trained import Training
from nash_mhc.parallel.fit import check_fit
from nash_mhc.parallel.mesh import describe, make_mesh
from nash_mhc.parallel.processes import from_leader, leader_first
from nash_mhc.telemetry import weights_and_biases
from nash_mhc.telemetry.sinks import Sink
from nash_mhc.telemetry.stream import Nowhere, Telemetry
from nash_mhc.telemetry.terminal import Reporter
from nash_mhc.train import history
from nash_mhc.train.evaluate import BrokenOff, Evaluator
from nash_mhc.train.feed import abstract_batch, host_batches, prefetched
from nash_mhc.train.files import begin_files, make_folder, run_files, use_compilation_cache
from nash_mhc.train.hardware import peak_flops
from nash_mhc.train.loop import BadSteps, train_loop
from nash_mhc.train.meter import Meter
from nash_mhc.train.programs import compile_train_step, make_objective
from nash_mhc.train.resume import check_resume, checkpoint_values, starting_state, told_by
from nash_mhc.train.saving import Saver
from nash_mhc.train.signals import SIGNALS, Interrupted
from nash_mhc.train.state import TrainState, abstract_state, sharded_abstract_state
from nash_mhc.train.watch import Watch

_MOST_UNROLLED = 16  # layers that are unrolled without being asked to


@dataclass(frozen=True)
class Result:
    """What a run leaves: the folder, the final state and the last evaluation."""

    folder: Folder
    state: TrainState
    evaluation: dict[str, float]
    floor: tuple[float, float] | None  # nats a token, bits a byte; None where the data does not know it


def for_platform(cfg: RunConfig, platform: str) -> RunConfig:
    """Fills in what depends on the kind of device (dtype, kernel, unrolling); refuses a kernel that cannot run there."""
    dtype = cfg.train.dtype if cfg.train.dtype != "auto" else ("float32" if platform == "cpu" else "bfloat16")
    attention = _attention_kernel(cfg, platform, dtype)
    unroll = cfg.train.unroll
    if unroll == "auto":  # gathered weights of several devices: not measured; many layers: a compiler that takes minutes
        one_gpu = platform == "gpu" and set(cfg.mesh.axes.values()) == {1}
        unroll = "yes" if one_gpu and cfg.model.depth <= _MOST_UNROLLED else "no"
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype, attention=attention, unroll=unroll))


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Starts the devices and fills in what depends on them; ConfigError for what does not fit them."""
    mesh = make_mesh(cfg.mesh)
    check_fit(cfg, mesh.shape)
    platform = mesh.devices.flat[0].platform
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **mesh.shape))
    cfg = for_platform(cfg, platform)
    make_objective(cfg)  # whether there is such an objective
    abstract_state(cfg)  # ... such an optimizer, and the parameters that are named
    return cfg, mesh


def _attention_kernel(cfg: RunConfig, platform: str, dtype: str) -> str:
    attention = architecture_of(cfg.model).attention(cfg.model)
    if attention is None:
        return "xla"
    shape = (platform, dtype, cfg.data.seq_len, *attention)
    if cfg.train.attention == "auto":
        return best_kernel(*shape)
    if reason := why_not(cfg.train.attention, *shape):
        raise ConfigError(f"--attention {cfg.train.attention} {reason}; leave it at auto ({best_kernel(*shape)} here)")
    return cfg.train.attention


def run(
    cfg: RunConfig,
    *,
    quiet: bool = False,
    each_step: Callable[[int], None] | None = None,
    sinks: Sequence[Sink] = (),
) -> Result:
    """Trains to the end of `cfg` and returns what came out; ConfigError for what the user must change.

    Interrupted when a signal has stopped it, with its last step saved: the same call goes on from there. `each_step` is called
    with the number of each step that has finished, while the next one runs. `sinks` get the rows of metrics and evaluations, as
    the run's own files do; of several processes, those of the first.
    """
    cfg, mesh = resolve(cfg)
    with Watch(stall_timeout=cfg.train.stall_timeout) as watch:
        reporter = Reporter(cfg.train.total_steps, None, quiet=quiet or jax.process_index() > 0, each_step=each_step)
        with contextlib.ExitStack() as held:
            return _train(cfg, mesh, watch, held, reporter, sinks)


def _is_there(folder: Folder) -> bool:
    with one_line(f"--checkpoint-dir {folder}"):
        return exists(folder, kind="directory")


def _hold(cfg: RunConfig, folder: Folder, watch: Watch, say: Callable[[str], None]) -> Owner:
    """The folder for this run alone; its other processes are let in once the first one has it."""
    watch.doing(f"waiting for {folder}")
    with one_line(f"--checkpoint-dir {folder}"):
        if jax.process_index() == 0:
            return hold(folder, wait=cfg.train.wait_for_lock, say=say)
        return accompany(folder)


def _parameters(cfg: RunConfig) -> str:
    text = f"{count_parameters(cfg.model):,} parameters"
    if cfg.optim.freeze is None and cfg.optim.train_only is None:
        return text
    trained, _ = Training.of(cfg.optim).split(abstract_state(cfg).model)
    return f"{text}, {sum(leaf.size for leaf in jax.tree.leaves(trained)):,} of them trained"


def _wandb_run(cfg: RunConfig, folder: Folder) -> dict[str, str] | None:
    """Project and id of the run at Weights & Biases; those of before where this folder's run has some, be it in use or not."""
    told = told_by(folder)
    before = told.wandb if told is not None else None
    if cfg.telemetry.wandb is None or (before is not None and before.get("project") == cfg.telemetry.wandb):
        return before
    return {"project": cfg.telemetry.wandb, "id": weights_and_biases.new_id()}


def _train(
    cfg: RunConfig, mesh: Mesh, watch: Watch, held: contextlib.ExitStack, reporter: Reporter, sinks: Sequence[Sink]
) -> Result:
    owner: Owner | None = None
    named = None if cfg.train.checkpoint_dir is None else place(cfg.train.checkpoint_dir)
    if named is not None and from_leader(lambda: _is_there(named)):
        owner = leader_first(lambda: _hold(cfg, named, watch, reporter.say))
        held.callback(owner.release)
    watch.doing("preparing the data")
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"--tokenizer {cfg.data.tokenizer} has {tokenizer.vocab_size} tokens, the model only {cfg.model.vocab_size}; "
            f"set --model-vocab-size {tokenizer.vocab_size}"
        )
    floor = loss_floor(cfg.data, tokenizer)
    align = cfg.model.alignment
    source = leader_first(lambda: open_source(cfg.data, tokenizer, split=cfg.data.split, seed=cfg.train.seed, align=align))
    from_leader(lambda: check_resume(cfg, rows=source.identity))
    from_leader(lambda: weights_and_biases.check(cfg.telemetry))
    held_out = leader_first(lambda: open_held_out(cfg.data, tokenizer, align=align))
    evaluator = None if held_out is None else Evaluator(cfg, held_out, tokenizer, mesh)
    folder = place(from_leader(lambda: str(make_folder(cfg))))  # last of the checks: what is refused leaves nothing behind
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, checkpoint_dir=str(folder)))
    if owner is None:
        owner = leader_first(lambda: _hold(cfg, folder, watch, reporter.say))
        held.callback(owner.release)
        from_leader(lambda: check_resume(cfg, rows=source.identity))  # another run may have begun, and ended, there meanwhile
    use_compilation_cache(folder)
    reporter.floor = floor[0] if floor else None
    reporter.say(f"{describe(mesh)}, {cfg.train.dtype}; {_parameters(cfg)}; run in {folder}")
    if told := source.held_out if held_out is not None else f"no text is held out of {cfg.data.dataset}: nothing is evaluated":
        reporter.say(told)
    evaluation: dict[str, float] = {}
    evaluated: list[int] = []  # the steps with an evaluation

    with Store(folder, keep=cfg.train.keep_last, keep_every=cfg.train.keep_every) as store:
        reporter.say("compiling the step ...")
        watch.doing("compiling")
        step_fn = compile_train_step(cfg, mesh, source, warn=reporter.say)
        compiled = step_fn.begin(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))
        # Meanwhile: the weights, whose making is compiled as well, and the evaluation.
        start = starting_state(cfg, mesh, store, reporter.say)
        state, start_step = start.state, start.step
        store.warm_up(state)
        changed = history.changes(start.before.config, cfg) if start.before is not None else {}
        known = {"init_from": start.init_from, "history": history.added_to(start.history, changed, start_step)}
        known["wandb"] = wandb = from_leader(lambda: _wandb_run(cfg, folder))
        files = run_files(cfg, mesh, floor, source.identity, state.model, known)
        done = start_step >= cfg.train.total_steps
        made_up = evaluator is not None and start.evaluation_missing(1 if done else cfg.train.eval_interval)
        telemetry: Telemetry = Nowhere()
        if jax.process_index() == 0:
            others = list(sinks)
            if wandb is not None and cfg.telemetry.wandb is not None:
                others.append(weights_and_biases.WeightsAndBiases(cfg.telemetry, folder, wandb["id"], cfg.to_dict()))
                reporter.say(f"wandb: run {wandb['id']} of project {wandb['project']}, {cfg.telemetry.wandb_mode}")
            telemetry = begin_files(folder, files, start_step, made_up, reporter.say, owner, others)
        saver = Saver(store, files, say=reporter.say, owner=owner, last=start_step if start.own else None)
        if evaluator is not None:
            evaluator.compile(state.model)
        compiled()
        reporter.say(f"compiled in {step_fn.seconds:.1f} s; starting from {start.origin}")
        for line in history.about(changed, cfg, int(state.step)):
            reporter.say(line)

        def evaluate(state: TrainState, step: int, *, told_before: bool = False) -> None:
            if evaluator is None:
                return

            def should_stop() -> bool:
                watch.doing(f"evaluation at step {step}", working=True)
                return watch.should_stop()

            try:
                found = evaluator.evaluate(state.model, should_stop)
                if state.ema is not None:
                    found["eval/loss_ema"] = evaluator.evaluate(state.best_model, should_stop)["eval/loss"]
            except BrokenOff:
                reporter.say(f"the evaluation at step {step} is broken off; the run that goes on from here begins with it")
                return
            evaluation.update(found)
            evaluated.append(step)
            if not told_before:
                telemetry.write(step, evaluation, file="eval.jsonl")
            reporter.say(_evaluation_line(step, evaluation, floor))

        def save(state: TrainState, step: int, *, wait: bool = False) -> None:
            watch.doing(f"saving step {step}")  # which storage may hold up for as long as it likes
            with jax.transfer_guard("allow"):  # Orbax copies the state to the host in its own way
                told = dict(evaluation) if evaluated[-1:] == [step] else None
                values = checkpoint_values(
                    cfg, step, rows=source.identity, counted=meter.to_json(), metrics=meter.last, evaluation=told
                )
                saver.save(state, step, values, wait=wait)

        rows_a_step = cfg.data.batch_size * cfg.train.grad_accum

        def besides(step: int) -> dict[str, Any]:
            """What a row of metrics tells that no step has measured."""
            saved = {} if saver.last is None else {"last_checkpoint": saver.last}
            return saved | {f"epochs/{name}": count for name, count in source.epochs(step * rows_a_step).items()}

        rows = host_batches(cfg.data, source, mesh, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed, start_step=start_step)
        meter = Meter(
            cfg,
            architecture_of(cfg.model).flops_per_token(cfg.model, cfg.data.seq_len),
            peak_flops(mesh, cfg.train.dtype),
            step=start_step,
            updates=int(state.step),
            saved=start.values,
        )
        feed = prefetched(rows, mesh)
        if read := passes(source.epochs(cfg.train.total_steps * rows_a_step)):
            reporter.say(f"the run {read}")
        reporter.begin(start_step)
        step = start_step
        try:
            with SIGNALS.at_work():
                if not done:
                    if made_up:
                        evaluate(state, start_step)
                    state, step = train_loop(
                        cfg, state, step_fn, feed, start_step=start_step, meter=meter, telemetry=telemetry, watch=watch,
                        reporter=reporter, evaluate=evaluate, save=save, save_again=saver.due, besides=besides,
                    )  # fmt: skip
                else:
                    reporter.say(f"all {cfg.train.total_steps} steps are done already; raise --total-steps to train on")
                    evaluate(state, start_step, told_before=start.own and not made_up)
                if step > start_step or not store.steps():  # what was restored from another folder shall stand in this one, too
                    save(state, step, wait=True)
                if SIGNALS.caught is not None or step < cfg.train.total_steps:
                    raise Interrupted(step, str(folder))
        except BadSteps as bad:
            saver.settle()
            spiky = " or were spikes" if cfg.train.on_spike == "skip" else ""
            good = [f"the last checkpoint before them is step {step}" for step in store.steps() if step < bad.first]
            raise ConfigError(
                f"steps {bad.first} to {bad.last} had no finite loss and gradients{spiky}, and were skipped; "
                f"the run stops here; {(good or ['there is no checkpoint before them'])[-1]}; step {bad.first} read "
                f"{rows_of_step(source, bad.first, rows_a_step, cfg.train.seed)}; look at them with "
                f"python -m nash_mhc.data inspect {shlex.quote(str(folder))} --step {bad.first}"
            ) from None
        finally:
            reporter.end()
            feed.close()  # type: ignore[attr-defined]
            rows.close()  # type: ignore[attr-defined]
            telemetry.close()
    return Result(folder, state, dict(evaluation), floor)


def _evaluation_line(step: int, evaluation: dict[str, float], floor: tuple[float, float] | None) -> str:
    loss = evaluation["eval/loss"]
    text = f"held out at step {step}: loss {loss:.4f}"
    if "eval/bits_per_byte" in evaluation:
        text += f" nats a token, {evaluation['eval/bits_per_byte']:.4f} bits a byte"
        text += f", perplexity {evaluation['eval/perplexity']:.2f}"
    if "eval/accuracy" in evaluation:
        text += f", accuracy {evaluation['eval/accuracy']:.1%}"
    if floor is not None:
        text += f"; the floor of this text is {floor[0]:.4f} nats, {floor[1]:.4f} bits: {loss / floor[0]:.2f}x"
    return text
