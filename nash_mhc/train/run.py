"""One run from its configuration: mesh, state, data, compiled step, loop, files."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nash_mhc import __version__
from nash_mhc.checkpoint.faults import as_os_errors, reason
from nash_mhc.checkpoint.store import Store
from nash_mhc.config.places import Folder, is_remote, place
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.data.sources import loss_floor, open_source
from nash_mhc.data.tokens import load_tokenizer
from nash_mhc.model.lm import Execution, count_parameters, flops_per_token
from nash_mhc.ops.attend import best_kernel, why_not
from nash_mhc.parallel.fit import check_fit
from nash_mhc.parallel.mesh import describe, make_mesh
from nash_mhc.train.compiled import CompiledStep
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.feed import abstract_batch, host_batches, prefetched
from nash_mhc.train.hardware import peak_flops
from nash_mhc.train.loop import BadSteps, train_loop
from nash_mhc.train.meter import Meter
from nash_mhc.train.objective import next_token
from nash_mhc.train.resume import check_resume, starting_state
from nash_mhc.train.saving import Saver, write_files
from nash_mhc.train.state import TrainState, sharded_abstract_state, state_shardings
from nash_mhc.train.step import Objective, make_train_step
from nash_mhc.train.telemetry import Reporter, Telemetry

_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclass(frozen=True)
class Result:
    """What a run leaves: the folder, the final state and the last evaluation."""

    folder: Folder
    state: TrainState
    evaluation: dict[str, float]
    floor: tuple[float, float] | None  # nats a token, bits a byte; None where the data does not know it


def for_platform(cfg: RunConfig, platform: str) -> RunConfig:
    """Fills in what depends on the kind of device, dtype and attention kernel; refuses a kernel that cannot run there."""
    dtype = cfg.train.dtype if cfg.train.dtype != "auto" else ("float32" if platform == "cpu" else "bfloat16")
    attention = _attention_kernel(cfg, platform, dtype)
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype=dtype, attention=attention))


def resolve(cfg: RunConfig) -> tuple[RunConfig, Mesh]:
    """Starts the devices and fills in what depends on them; ConfigError for what does not fit them."""
    mesh = make_mesh(cfg.mesh)
    check_fit(cfg, mesh.shape)
    platform = mesh.devices.flat[0].platform
    shape = {axis: mesh.shape[axis] for axis in ("data", "fsdp", "tp")}
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, platform=platform, **shape))
    return for_platform(cfg, platform), mesh


def _attention_kernel(cfg: RunConfig, platform: str, dtype: str) -> str:
    shape = (platform, dtype, cfg.data.seq_len, cfg.model.head_dim, cfg.model.window)
    if cfg.train.attention == "auto":
        return best_kernel(*shape)
    if reason := why_not(cfg.train.attention, *shape):
        raise ConfigError(f"--attention {cfg.train.attention} {reason}; leave it at auto ({best_kernel(*shape)} here)")
    return cfg.train.attention


def make_objective(cfg: RunConfig, most_documents: int | None = None) -> Objective:
    """`most_documents`: what a row holds at most, where that is known: attention need not find out then."""
    execution = Execution(cfg.train.dtype, cfg.train.remat, cfg.train.attention, most_documents)
    z, sparsity = cfg.optim.z_loss, cfg.optim.sparsity
    return functools.partial(next_token, execution=execution, z_weight=z, sparsity_weight=sparsity)


def compile_train_step(cfg: RunConfig, mesh: Mesh, *, most_documents: int | None = None, **options: Any) -> CompiledStep:
    """The real step, donated, with the state pinned to its shardings: what the run, the benchmark and the tests all use."""
    out = (state_shardings(cfg, mesh), None)
    step = make_train_step(cfg, make_objective(cfg, most_documents))
    return CompiledStep(step, mesh, donate=True, out_shardings=out, **options)


def _make_folder(cfg: RunConfig) -> Folder:
    """The run's folder, writable. One that the user did not name is new: two runs never meet by accident."""
    named, stamp = cfg.train.checkpoint_dir, f"runs/{cfg.model_size}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [named] if named else [stamp, *(f"{stamp}-{n}" for n in range(2, 100))]
    folder = place(next(c for c in candidates if named or not Path(c).exists()))
    try:
        with as_os_errors():
            if not is_remote(folder):
                folder.mkdir(parents=True, exist_ok=bool(named))
            (folder / ".writable").write_text("")
            (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"--checkpoint-dir {folder}: cannot be written ({reason(error)}); choose another folder") from error
    return folder


def _describe_run(cfg: RunConfig, mesh: Mesh, floor: tuple[float, float] | None, rows: str) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "config": cfg.to_dict(),
        "rows": rows,
        "parameters": count_parameters(cfg.model),
        "mesh": {axis: mesh.shape[axis] for axis in mesh.axis_names},
        "devices": {"platform": device.platform, "kind": device.device_kind, "count": mesh.size},
        "versions": {"nash_mhc": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "floor": None if floor is None else {"nats_per_token": floor[0], "bits_per_byte": floor[1]},
    }


def _parameter_table(state: TrainState) -> str:
    """Name, shape and size of every parameter, for whoever wants to see what the model is made of."""
    from clu import parameter_overview  # brings flax along, which takes a second to import

    leaves = jax.tree_util.tree_flatten_with_path(state.model)[0]
    shapes = {jax.tree_util.keystr(path).lstrip("."): jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in leaves}
    return parameter_overview.get_parameter_overview(shapes, include_stats=False) + "\n"


def use_compilation_cache(folder: Folder) -> None:
    """A restarted run starts in seconds: compiled programs are kept beside the runs, unless the user keeps them elsewhere.

    Those of a run in an object store lie where the runs of this machine have theirs: they are of no use to another machine.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.values["jax_compilation_cache_dir"] is None:
        beside = Path("runs") if is_remote(folder) else folder.parent
        jax.config.update("jax_compilation_cache_dir", str((beside / ".jax_cache").absolute()))


def run(cfg: RunConfig, *, quiet: bool = False) -> Result:
    """Trains to the end of `cfg` and returns what came out; ConfigError for what the user must change."""
    cfg, mesh = resolve(cfg)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"--tokenizer {cfg.data.tokenizer} has {tokenizer.vocab_size} tokens, the model only {cfg.model.vocab_size}; "
            f"set --model-vocab-size {tokenizer.vocab_size}"
        )
    floor = loss_floor(cfg.data, tokenizer)
    source = open_source(cfg.data, tokenizer, split=cfg.data.split, seed=cfg.train.seed, align=cfg.model.coarsest_stride)
    check_resume(cfg, rows=source.identity)
    evaluator = Evaluator(cfg, make_objective(cfg), tokenizer, mesh)
    folder = _make_folder(cfg)  # last of the checks: what is refused leaves nothing behind
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, checkpoint_dir=str(folder)))
    use_compilation_cache(folder)
    reporter = Reporter(cfg.train.total_steps, floor[0] if floor else None, quiet=quiet)
    reporter.say(f"{describe(mesh)}, {cfg.train.dtype}; {count_parameters(cfg.model):,} parameters; run in {folder}")
    evaluation: dict[str, float] = {}
    evaluated: list[int] = []  # the steps with an evaluation

    with Store(folder, keep=cfg.train.keep_last, keep_every=cfg.train.keep_every) as store:
        reporter.say("compiling the step ...")
        step_fn = compile_train_step(cfg, mesh, most_documents=source.most_documents, warn=reporter.say)
        compiled = step_fn.begin(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))
        # Meanwhile: the weights, whose making is compiled as well, and the evaluation.
        state, start_step, tokens_seen, origin = starting_state(cfg, mesh, store, reporter.say)
        files = {
            "run.json": json.dumps(_describe_run(cfg, mesh, floor, source.identity), indent=2) + "\n",
            "parameters.txt": _parameter_table(state),
        }
        try:
            write_files(folder, files)
            telemetry = Telemetry(folder, start_step=start_step, say=reporter.say)
        except OSError as error:
            remedy = "make room there or choose another folder"
            raise ConfigError(f"--checkpoint-dir {folder}: cannot be written ({reason(error)}); {remedy}") from error
        saver = Saver(store, files, attempts=cfg.train.save_attempts, say=reporter.say)
        evaluator.compile(state.model)
        compiled()
        reporter.say(f"compiled in {step_fn.seconds:.1f} s; starting from {origin}")

        def evaluate(state: TrainState, step: int) -> None:
            evaluation.update(evaluator.evaluate(state.model))
            evaluated.append(step)
            if state.ema is not None:
                evaluation["eval/loss_ema"] = evaluator.evaluate(state.ema)["eval/loss"]
            if step > start_step:  # a run that had nothing left to do has its row already
                telemetry.write(step, evaluation, file="eval.jsonl")
            reporter.say(_evaluation_line(step, evaluation, floor))

        def save(state: TrainState, step: int, *, wait: bool = False) -> None:
            with jax.transfer_guard("allow"):  # Orbax copies the state to the host in its own way
                told = dict(evaluation) if evaluated[-1:] == [step] else None
                values = {"step": step, "config": cfg.to_dict(), "tokens_seen": meter.tokens_seen, "evaluation": told}
                saver.save(state, step, values, wait=wait)

        rows_a_step = cfg.data.batch_size * cfg.train.grad_accum
        rows = host_batches(cfg.data, source, grad_accum=cfg.train.grad_accum, seed=cfg.train.seed, start_step=start_step)
        meter = Meter(
            cfg,
            flops_per_token(cfg.model, cfg.data.seq_len),
            peak_flops(mesh, cfg.train.dtype),
            tokens_seen,
            start_step - int(state.step),
        )
        feed = prefetched(rows, mesh)
        if read := source.epochs(cfg.train.total_steps * rows_a_step):
            reporter.say("epochs in all: " + ", ".join(f"{name} {count:.3g}" for name, count in read.items()))
        reporter.begin(start_step)
        try:
            if start_step < cfg.train.total_steps:
                state = train_loop(
                    cfg, state, step_fn, feed, start_step=start_step, meter=meter, telemetry=telemetry,
                    reporter=reporter, evaluate=evaluate, save=save, save_again=saver.due,
                    epochs=lambda step: source.epochs(step * rows_a_step),
                )  # fmt: skip
                save(state, cfg.train.total_steps, wait=True)  # begun in the loop, unless a fault of the storage kept it
            else:
                reporter.say(f"all {cfg.train.total_steps} steps are done already; raise --total-steps to train on")
                evaluate(state, start_step)
                if not store.steps():  # restored from another run's folder: this one shall stand on its own
                    save(state, start_step, wait=True)
        except BadSteps as bad:
            saver.settle()
            good = [f"the last checkpoint before them is step {step}" for step in store.steps() if step < bad.first]
            raise ConfigError(
                f"steps {bad.first} to {bad.last} had no finite loss and gradients, and were skipped; the run stops here; "
                f"{(good or ['there is no checkpoint before them'])[-1]}; look at what was read with "
                f"python -m nash_mhc.data inspect {folder} --step {bad.first}"
            ) from None
        finally:
            reporter.end()
            feed.close()  # type: ignore[attr-defined]
            rows.close()  # type: ignore[attr-defined]
            telemetry.close()
    return Result(folder, state, dict(evaluation), floor)


def _evaluation_line(step: int, evaluation: dict[str, float], floor: tuple[float, float] | None) -> str:
    loss, bits = evaluation["eval/loss"], evaluation["eval/bits_per_byte"]
    text = (
        f"held out at step {step}: loss {loss:.4f} nats a token, {bits:.4f} bits a byte, "
        f"perplexity {evaluation['eval/perplexity']:.2f}, accuracy {evaluation['eval/accuracy']:.1%}"
    )
    if floor is not None:
        text += f"; the floor of this text is {floor[0]:.4f} nats, {floor[1]:.4f} bits: {loss / floor[0]:.2f}x"
    return text


def next_commands(result: Result, argv: Sequence[str]) -> str:
    """What to type after a run that was started with these arguments."""
    python = Path(sys.executable)
    here = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else Path("python")
    tensorboard = here.with_name("tensorboard")
    longer = shlex.join([*argv, "--total-steps", str(10 * int(result.state.step))])
    return (
        f"\nThe run is in {result.folder}. Next:\n"
        f"  {here} -m nash_mhc.generate --checkpoint-dir {result.folder}\n"
        f"  {here} -m nash_mhc.report {result.folder}\n"
        f"  {tensorboard} --logdir {result.folder}\n"
        f"  {here} -m nash_mhc.train {longer}   # ten times the steps"
    )
