"""`python -m nash_mhc.doctor [DIR]`: check whether this machine can train. Each line is ok, or says what to do."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from nash_mhc import __version__
from nash_mhc.config.commands import OneLineParser, file_to_write, local_path, one_line_errors, run_path
from nash_mhc.config.humanize import counted, duration
from nash_mhc.config.schema import ConfigError
from nash_mhc.doctor.checks import check_accelerators, check_hidden_gpus, check_packages, installed_versions
from nash_mhc.doctor.findings import PROBLEM, SKIPPED, WARNING, Finding, Lines, one_line, run_isolated

_CHECKS = "nash_mhc.doctor.checks"
_DEVICES = ("imports", "devices", "matmul", "all-reduce")
_REPORT = "please report this; the other checks do not depend on it"
_SMOKE_PATIENCE = 5.0  # times the time limit: it compiles
_FAST_COMPILATION = "--xla_backend_optimization_level=0"  # on a CPU: compile fast, run slowly


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m nash_mhc.doctor", allow_abbrev=False,
        description="Check this machine and try every stage of a run. Exit code 1 if a run would fail.",
    )  # fmt: skip
    text = "run directory to check, local or gs://; it may not exist yet (default: the current directory)"
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help=text)
    parser.add_argument("--quick", action="store_true", help="skip the smoke test, which takes most of the time")
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results to this file")
    text = "seconds without output before a check is considered hung, 5x for the smoke test (default: 120)"
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help=text)
    args = parser.parse_strictly(argv, "give one directory")
    if not 0 < args.timeout < 1e6:
        raise ConfigError(f"--timeout {args.timeout:g}: must be a number of seconds above 0")
    args.json = file_to_write("--json", args.json)
    name = args.folder
    if name is not None and not ("/" in name or os.path.isdir(name)):  # a setting, or a typo
        setting = "; doctor takes no run settings" if "=" in name else ""
        raise ConfigError(f"{name!r}: no such directory{setting}; a new one needs a slash in its name: runs/NAME")
    return args


def _guarded(check: str, run: Callable[[], Iterable[Finding] | None], lines: Lines) -> None:
    """Show the findings of one check. If it raises, show that as a finding, so that the others still run."""
    try:
        for finding in run() or ():
            lines.found(finding)
    except Exception as error:
        status = PROBLEM if isinstance(error, OSError) else WARNING  # such as: no directory for temporary files
        lines.found(Finding(check, status, f"the check failed ({type(error).__name__}: {one_line(error)})", _REPORT))


def _smoke(lines: Lines, limit_s: float) -> None:
    """Run the smoke test, unless a check of the devices has failed: then it would fail the same way, minutes later."""
    devices = lines.figures("devices")
    failed = [f.check for f in lines.findings if f.status in (PROBLEM, SKIPPED) and f.check in _DEVICES]
    if failed or not devices:
        lines.found(Finding("smoke test", SKIPPED, f"because of {failed[0] if failed else 'devices'}"))
        return
    if devices["processes"] > 1:
        text = "it needs all processes; train for 2 steps with the same launcher"
        lines.found(Finding("smoke test", SKIPPED, text))
        return
    env = dict(os.environ)
    if devices["platform"] == "cpu":
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {_FAST_COMPILATION}".strip()
    with tempfile.TemporaryDirectory(prefix="nash-mhc-doctor-", ignore_cleanup_errors=True) as scratch:
        settings = {"scratch": scratch, "platform": devices["platform"], "count": devices["count"]}
        run_isolated(lines, f"{_CHECKS}:smoke_test", ["smoke test"], settings, _SMOKE_PATIENCE * limit_s, env)


def examine(args: argparse.Namespace, lines: Lines) -> None:
    isolated = lambda function, checks, settings: run_isolated(
        lines, f"{_CHECKS}:{function}", checks, settings, args.timeout, os.environ
    )
    _guarded("packages", check_packages, lines)
    _guarded("accelerators", check_accelerators, lines)
    _guarded("storage", lambda: isolated("check_storage", ["storage"], {"folder": args.folder or "."}), lines)
    _guarded("devices", lambda: isolated("check_devices", _DEVICES, {}), lines)
    if devices := lines.figures("devices"):
        gpus = lines.figures("accelerators").get("gpus", [])
        _guarded("devices", lambda: check_hidden_gpus(gpus, devices, installed_versions(), os.environ), lines)
    if not args.quick:
        _guarded("smoke test", lambda: _smoke(lines, args.timeout), lines)


def main() -> int:
    args, start = parse(sys.argv[1:]), time.monotonic()
    # Exit through every `finally`, so that child processes end and their files are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    lines = Lines()
    try:
        examine(args, lines)
    finally:
        lines.end()
    seconds = time.monotonic() - start
    problems, warnings = (sum(f.status == status for f in lines.findings) for status in (PROBLEM, WARNING))
    and_warnings = f", {counted(warnings, 'warning')}" if warnings else ""
    verdict = f"{counted(problems, 'problem')}{and_warnings}: a run would fail here"
    verdict = verdict if problems else f"ready to train{and_warnings}"
    lines.say(f"{verdict} ({duration(seconds)})")
    code = 1 if problems else 0
    if args.json:
        findings = [asdict(finding) for finding in lines.findings]
        content = {"nash_mhc": __version__, "exit_code": code, "seconds": round(seconds, 2), "findings": findings}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
