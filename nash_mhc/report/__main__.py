"""`python -m nash_mhc.report DIR`: the files of a run -> one HTML page and a summary on the terminal."""

from __future__ import annotations

import sys

from nash_mhc.config.commands import OneLineParser, one_line_errors
from nash_mhc.config.schema import ConfigError
from nash_mhc.report.page import facts, open_run, write_page
from nash_mhc.storage.paths import place


def main() -> int:
    parser = OneLineParser(prog="python -m nash_mhc.report", allow_abbrev=False, description="One HTML page about a run.")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="folder of the run")
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: DIR/report.html)")
    args = parser.parse_strictly(sys.argv[1:], "one folder at a time")
    if args.folder is None:
        raise ConfigError("which run? Give its folder: python -m nash_mhc.report runs/tiny-20260101-120000")
    run = open_run(args.folder)
    out = place(args.out) if args.out else run.folder / "report.html"
    write_page(run, out)
    for name, text in facts(run).items():
        print(f"{name:<32} {text}")
    if len(run.rows) < 2:
        print(f"the run has {len(run.rows) or 'no'} row{'s' * (not run.rows)} of metrics so far: the charts say little yet")
    print(f"report: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
