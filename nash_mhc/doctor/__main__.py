"""`python -m nash_mhc.doctor [FOLDER]`: is this machine ready to train? Each line is fine, or says what to do."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nash_mhc import __version__
from nash_mhc.config.commands import OneLineParser, file_to_write, local_path, one_line_errors, run_path
from nash_mhc.config.humanize import counted, duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.doctor.findings import OK, PROBLEM, SKIPPED, WARNING, Finding, told
from nash_mhc.doctor.isolated import Watched
from nash_mhc.doctor.machine import check_memory, compare
from nash_mhc.doctor.packages import check_packages, device_packages
from nash_mhc.doctor.show import Lines
from nash_mhc.doctor.smoke import hurried

_DEVICES = ("imports", "devices", "matmul", "all-reduce", "device memory")
_REPORT = "please report this; the other checks do not depend on it"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m nash_mhc.doctor", allow_abbrev=False,
        description="Looks at this machine and tries what a run needs. Exit code 1 where something would stop one.",
    )  # fmt: skip
    text = "where a run would write: its folder, here or gs://; it need not be there yet [the current folder]"
    parser.add_argument("folder", type=run_path, metavar="FOLDER", nargs="?", help=text)
    parser.add_argument("--quick", action="store_true", help="skip the smoke test, which takes most of the time")
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results to this file")
    text = "seconds a check may be silent; five times as long for the smoke test [120]"
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help=text)
    args = parser.parse_strictly(argv, "name one folder")
    if not 0 < args.timeout < 1e6:
        raise ConfigError(f"--timeout {args.timeout:g}: must be a number of seconds above 0")
    file_to_write("--json", args.json)
    name = args.folder
    if name is not None and not ("/" in name or os.path.isdir(name)):  # a setting, or a typo
        setting = "; doctor takes no settings of a run" if "=" in name else ""
        raise ConfigError(f"{name!r}: there is no such folder{setting}; a new one has a slash in its name: runs/NAME")
    return args


def _each(check: str, look: Callable[[], Iterable[Finding] | None], lines: Lines) -> None:
    """No check can end the others. Those in a process of their own have told what they found when they return."""
    try:
        for finding in look() or ():
            lines.found(finding)
    except Exception as error:  # whatever it is: a file of the system that looks otherwise, a package half installed
        lines.found(Finding(check, WARNING, f"could not be looked at ({type(error).__name__}: {told(error)})", _REPORT))


def _figures(lines: Lines, check: str) -> dict[str, Any]:
    return next((f.figures for f in lines.findings if f.check == check and f.status == OK), {})


def _smoke(watched: Watched, lines: Lines) -> None:
    """Only where the devices answer; where one fails, the run would fail in the same way, after minutes."""
    seen, env = _figures(lines, "devices"), os.environ
    failed = [f.check for f in lines.findings if f.status in (PROBLEM, SKIPPED) and f.check in _DEVICES]
    if not seen or failed or seen["processes"] > 1:
        alone = f"because of {failed[0] if failed else 'devices'}"
        reason = alone if failed or not seen else "it takes all processes; train for 2 steps with the same launcher"
        lines.found(Finding("smoke test", SKIPPED, reason))
        return
    with tempfile.TemporaryDirectory(prefix="nash-mhc-doctor-", ignore_cleanup_errors=True) as scratch:
        settings = {"scratch": scratch, "platform": seen["platform"], "count": seen["count"]}
        watched.run("smoke", ["smoke test"], settings, env if seen["platform"] != "cpu" else hurried(env))


def _has_temporary_files(lines: Lines) -> bool:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        remedy = "make room there, or set TMPDIR to a folder that can be written"
        lines.found(Finding("temporary files", PROBLEM, told(error), remedy))
        return False
    return True


def examine(args: argparse.Namespace, lines: Lines) -> None:
    watched = Watched(lines.found, lines.busy, args.timeout)
    # A folder that is named is a run's; without a name, runs are made below ./runs.
    where = {"folder": args.folder or ".", "run_folder": args.folder or "runs/new"}
    _each("packages", check_packages, lines)
    _each("host memory", check_memory, lines)
    if not _has_temporary_files(lines):
        return  # what follows keeps there what its processes say
    _each("accelerators", lambda: watched.run("accelerators", ["accelerators"], {}, os.environ), lines)
    _each("storage", lambda: watched.run("storage", ["storage", "compilation cache"], where, os.environ), lines)
    _each("devices", lambda: watched.run("devices", _DEVICES, {}, os.environ), lines)
    if seen := _figures(lines, "devices"):
        _each("devices", lambda: compare(_figures(lines, "accelerators"), seen, device_packages(), os.environ), lines)
    if not args.quick:
        _each("smoke test", lambda: _smoke(watched, lines), lines)


def verdict(findings: Sequence[Finding]) -> tuple[int, str]:
    """(exit code, the last line)"""
    count = lambda status: sum(finding.status == status for finding in findings)
    wrong, odd = count(PROBLEM), count(WARNING)
    noted = f", {counted(odd, 'warning')}" * bool(odd)
    if wrong:
        return 1, f"{counted(wrong, 'problem')}{noted}: a run would not get far here"
    return 0, "all is well" if not odd else f"ready to train{noted}"


def _write(file: str, lines: Lines, code: int, seconds: float) -> int:
    found = [finding.as_dict() for finding in lines.findings]
    content = {"nash_mhc": __version__, "exit_code": code, "seconds": round(seconds, 2), "findings": found}
    try:
        Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"error: --json {file}: cannot be written ({error.strerror}); name another file", file=sys.stderr)
        return 2
    return code


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)  # by way of every `finally`: processes end, and their folder goes


def main() -> int:
    args, began = parse(sys.argv[1:]), time.monotonic()
    signal.signal(signal.SIGTERM, _leave)
    lines = Lines()
    try:
        examine(args, lines)
    finally:
        lines.end()
    seconds = time.monotonic() - began
    code, text = verdict(lines.findings)
    lines.say(f"{text} ({duration(seconds)})")
    return _write(args.json, lines, code, seconds) if args.json else code


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
