"""`python -m nash_mhc.train`: flags, YAML and key=value -> a training run."""

from __future__ import annotations

import argparse
import gc
import io
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.commands import module_command, one_line_errors, resume_command, this_python
from nash_mhc.config.parsing import Parsed, as_flags, parse, render, with_origins
from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.estimate.preflight import after_running_out, best_here, room_of
from nash_mhc.model.architectures import architecture_of
from nash_mhc.parallel.board import LostProcess
from nash_mhc.runtime.compiled import is_compiling
from nash_mhc.runtime.compiler_options import as_comments
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, Interrupted, exit_now
from nash_mhc.telemetry.terminal import JsonReporter
from nash_mhc.train.devices import join, resolve
from nash_mhc.train.inferred_settings import found_settings, recorded_settings
from nash_mhc.train.samples import TEMPERATURE
from nash_mhc.train.trainer import Result, run
from nash_mhc.train.verify_resume import STEPS, verify_resume


def _show_sample(sample: str) -> None:
    """A first look at what was learned."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows what it can
    print(f"\nA sample (temperature {TEMPERATURE}):")
    print(sample if sample.strip() else "(it is blank: the model has not learned to begin a text yet)")


def next_commands(result: Result, also: Sequence[str] = ()) -> str:
    """What to type after a run, with these flags where it is continued: commands that run as they stand."""
    folder = str(result.folder)
    tensorboard = Path(this_python()).with_name("tensorboard")
    longer = ["--total-steps", str(10 * max(RunFolder(result.folder).steps(), default=1))]
    # A model that sees all places at once writes nothing: what it solves is what there is to see.
    writes = getattr(result.state.model.cfg, "causal", True)
    look = ["nash_mhc.generate", folder] if writes else ["nash_mhc.evaluate", folder, "--tasks", "held_out"]
    commands = [
        module_command(*look),
        module_command("nash_mhc.report", folder),
        shlex.join([str(tensorboard), "--logdir", folder]),
        f"{resume_command(folder, *longer, *also)}   # continues to ten times the steps",
    ]
    return "\n".join([f"\nThe run is in {folder}. Next:", *(f"  {command}" for command in commands)])


def _again_flags(parsed: Parsed) -> list[str]:
    """Flags of this start that a run does not record, and that continuing it takes again."""
    processes = [f"mesh.{name}" for name in ("coordinator_address", "num_processes", "process_id", "connect_timeout")]
    return as_flags({path: parsed.given[path] for path in processes if path in parsed.given}) + [
        flag for flag, is_set in {"--no-preflight": parsed.own.no_preflight}.items() if is_set
    ]


def out_of_memory(cfg: RunConfig, error: Exception, again: str = "the same command") -> ConfigError:
    """What holds most, and what to change, the least harmful first; `again` is the command that continues the run."""
    told = re.split(r" with allocator| \[|\n", str(error).partition("RESOURCE_EXHAUSTED")[2].lstrip(": "))
    said = told[0].rstrip(".") or "out of memory"
    cfg, mesh = resolve(cfg)
    if architecture_of(cfg.model).activations is not None:
        return after_running_out(cfg, mesh.shape, room_of(mesh), said, again)
    return ConfigError(
        f"the devices have too little memory for this run ({said}); try a smaller --batch-size with more --grad-accum, --remat "
        f"full, or more devices along --mesh-fsdp; what is saved stays, and with those flags this continues from it: {again}"
    )


def _own_flags(group: argparse._ArgumentGroup) -> None:
    text = f"verify that resuming is exact: {STEPS} steps of this run, killed and resumed, also on another mesh"
    group.add_argument("--verify-resume", action="store_true", help=text)
    text = "use the mesh, remat and microbatches that are estimated to be the fastest here"
    group.add_argument("--mesh-auto", action="store_true", help=text)
    group.add_argument("--no-preflight", action="store_true", help="start despite the memory estimate")


def main() -> int:
    parsed = parse(
        sys.argv[1:],
        prog="python -m nash_mhc.train",
        own=_own_flags,
        found=found_settings,
        folder="train.checkpoint_dir",
        recorded=recorded_settings,
    )
    try:
        return _start(parsed)
    except ConfigError as error:
        raise with_origins(error, parsed) from None


def _start(parsed: Parsed) -> int:
    asked = parsed.config
    if parsed.own.mesh_auto:
        join(asked)  # first of all: the fastest mesh is looked for on the devices
        asked = best_here(asked, parsed.given, lambda text: print(text, file=sys.stderr))
    if parsed.own.verify_resume:
        return verify_resume(asked)
    if parsed.print_config:
        config, _ = resolve(asked)
        before, after = parsed.config.to_dict(), config.to_dict()
        origins = dict(parsed.origins)
        for section, values in after.items():
            if isinstance(values, dict):
                changed = {f"{section}.{k}" for k, v in values.items() if before[section][k] != v}
                origins |= {k: f"{origins[k]}, resolved here" for k in changed}
        print(render(config, origins), end="")
        print(as_comments(config.mesh.platform, deterministic=config.train.deterministic), end="")
        return 0
    folders: list[str] = []
    command = module_command("nash_mhc.train", *sys.argv[1:])
    again = _again_flags(parsed)
    try:
        result = run(asked, insist=parsed.own.no_preflight, command=command, opened=folders.append)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise out_of_memory(asked, error, *(resume_command(folder, *again) for folder in folders)) from None
    except Interrupted as stopped:
        if jax.process_index() == 0:
            print(f"stopped: {stopped}; to continue: {resume_command(stopped.folder, *again)}", file=sys.stderr)
        return TRY_AGAIN
    if parsed.config.telemetry.log_format == "json":
        done = JsonReporter(quiet=jax.process_index() > 0)
        done.tell("done", folder=str(result.folder), steps=parsed.config.train.total_steps, **result.evaluation)
        return 0
    if jax.process_index() == 0:
        if result.sample is not None:
            _show_sample(result.sample)
        print(next_commands(result, again + ["--patience", "0"] * bool(asked.train.patience)))
    return 0


def command() -> int:
    """`main`, with an exit code for whatever becomes of it."""
    gc.freeze()  # what was imported stays, and need not be looked through again
    gc.enable()
    try:
        code = one_line_errors(main)
    except LostProcess as lost:
        print(f"error: {lost}; start it again to resume from the last checkpoint", file=sys.stderr)
        exit_now()
    except Exception:
        traceback.print_exc()
        code = 1
    if code not in (0, TRY_AGAIN) or (is_compiling() and jax.process_count() == 1):
        exit_now(code)  # an ordinary end would wait for what still compiles, and JAX for the other processes
    SIGNALS.ending = code
    return code


if __name__ == "__main__":
    sys.exit(command())
