"""`python -m nash_mhc.train`: start or resume a training run from flags, YAML files and key=value pairs."""

from __future__ import annotations

import argparse
import gc
import io
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config import logs
from nash_mhc.config.commands import module_command, one_line_errors, resume_command, this_python
from nash_mhc.config.parsing import Parsed, as_flags, parse, render, with_origins
from nash_mhc.config.recorded import leaves
from nash_mhc.config.schema import ConfigError
from nash_mhc.estimate.preflight import fastest_here, out_of_memory
from nash_mhc.parallel.board import LostProcess
from nash_mhc.runtime.compiled import is_compiling
from nash_mhc.runtime.compiler_options import as_comments
from nash_mhc.runtime.signals import SIGNALS, TRY_AGAIN, Interrupted, exit_now
from nash_mhc.telemetry.terminal import print_event
from nash_mhc.train.inferred_settings import infer_settings, recorded_settings
from nash_mhc.train.inputs import join, resolve
from nash_mhc.train.samples import TEMPERATURE
from nash_mhc.train.trainer import Result, run


def _show_sample(sample: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without Unicode
    print(f"\nA sample (temperature {TEMPERATURE}):")
    print(sample if sample.strip() else "(blank: the model has not learned to begin a text yet)")


def next_commands(result: Result, flags: Sequence[str] = ()) -> str:
    """Return commands to type after a run; `flags` are added to the one that continues it."""
    folder = str(result.folder)
    tensorboard = Path(this_python()).with_name("tensorboard")
    longer = ["--total-steps", str(10 * max(RunFolder(result.folder).steps(), default=1))]
    # Only causal models generate text.
    is_causal = getattr(result.state.model.cfg, "causal", True)
    first = ["nash_mhc.generate", folder] if is_causal else ["nash_mhc.evaluate", folder, "--tasks", "held_out"]
    commands = [
        module_command(*first),
        module_command("nash_mhc.report", folder),
        shlex.join([str(tensorboard), "--logdir", folder]),
        f"{resume_command(folder, *longer, *flags)}   # continues to ten times the steps",
    ]
    return "\n".join([f"\nThe run is in {folder}. Next:", *(f"  {command}" for command in commands)])


def _unrecorded_flags(parsed: Parsed) -> list[str]:
    """Return the flags of this start that a run does not record, so that the command to resume it needs them."""
    processes = [f"mesh.{name}" for name in ("coordinator_address", "num_processes", "process_id", "connect_timeout")]
    given = {path: parsed.given[path] for path in processes if path in parsed.given}
    return as_flags(given) + ["--no-preflight"] * parsed.own.no_preflight


def _own_flags(group: argparse._ArgumentGroup) -> None:
    text = "use the mesh, remat and gradient accumulation with the highest estimated speed on these devices"
    group.add_argument("--mesh-auto", action="store_true", help=text)
    group.add_argument(
        "--no-preflight", action="store_true", help="start even if the estimated memory exceeds that of the devices"
    )


def main() -> int:
    parsed = parse(
        sys.argv[1:],
        prog="python -m nash_mhc.train",
        own=_own_flags,
        found=infer_settings,
        folder="train.checkpoint_dir",
        recorded=recorded_settings,
    )
    try:
        return _start(parsed)
    except ConfigError as error:
        raise with_origins(error, parsed) from None


def _start(parsed: Parsed) -> int:
    cfg = parsed.config
    logs.configure(cfg.telemetry.log_level)
    if parsed.own.mesh_auto:
        join(cfg)  # before the devices are used to find the fastest mesh
        cfg = fastest_here(cfg, parsed.given)
    if parsed.print_config:
        resolved, _ = resolve(cfg)
        before, after = leaves(parsed.config.to_dict()), leaves(resolved.to_dict())
        changed = {k: f"{parsed.origins[k]}, resolved here" for k in after if before[k] != after[k]}
        print(render(resolved, {**parsed.origins, **changed}), end="")
        print(as_comments(resolved.mesh.platform, deterministic=resolved.train.deterministic), end="")
        return 0
    folders: list[str] = []
    command = module_command("nash_mhc.train", *sys.argv[1:])
    flags = _unrecorded_flags(parsed)
    try:
        result = run(cfg, no_preflight=parsed.own.no_preflight, command=command, on_open=folders.append)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        resume = resume_command(folders[0], *flags) if folders else "the same command"
        raise out_of_memory(*resolve(cfg), error, resume) from None
    except Interrupted as stopped:
        if jax.process_index() == 0:
            print(f"stopped: {stopped}; to continue: {resume_command(stopped.folder, *flags)}", file=sys.stderr)
        return TRY_AGAIN
    if jax.process_index() > 0:
        return 0
    if parsed.config.telemetry.log_format == "json":
        values = {"folder": str(result.folder), "steps": parsed.config.train.total_steps, **result.evaluation}
        print_event("done", values)
        return 0
    if result.sample is not None:
        _show_sample(result.sample)
    print(next_commands(result, flags + ["--patience", "0"] * bool(cfg.train.patience)))
    return 0


def command() -> int:
    """Run `main` and return the exit code of the process."""
    gc.freeze()  # imported modules stay, so the collector need not visit them
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
        exit_now(code)  # a normal exit would wait for the compiler, and JAX for the other processes
    SIGNALS.ending = code
    return code


if __name__ == "__main__":
    sys.exit(command())
