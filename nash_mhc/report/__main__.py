"""`python -m nash_mhc.report DIR [DIR ...]`: write one HTML page about runs, and print a summary."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from nash_mhc.config.commands import OneLineParser, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError
from nash_mhc.report.contents import Run, facts, open_run, summarize
from nash_mhc.report.page import LiveServer, write_page
from nash_mhc.storage.files import to_path


def _show(runs: list[Run]) -> None:
    each = [facts(run) for run in runs]
    if len(runs) == 1:
        for name, text in each[0].items():
            print(f"{name:<32} {text}")
    else:
        table = Table("", *(run.name for run in runs))
        for name in dict.fromkeys(name for known in each for name in known):
            table.add_row(name, *(known.get(name, "") for known in each))
        Console().print(table)
    for run in runs:
        print(summarize(run) if len(runs) == 1 else f"{run.name}: {summarize(run)}")
        if len(run.rows) < 2:
            print(
                f"the run has {len(run.rows) or 'no'} row{'s' * (not run.rows)} of metrics so far: the charts are almost empty"
            )


def main() -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.report", allow_abbrev=False, description="Write one HTML page about one or more runs."
    )
    parser.add_argument(
        "folders", nargs="*", type=run_path, metavar="DIR", help="run directory; several are compared side by side"
    )
    parser.add_argument("--out", type=run_path, metavar="FILE", help="output file (default: report.html in the first DIR)")
    parser.add_argument("--live", action="store_true", help="serve a page that follows a running run, until Ctrl-C")
    parser.add_argument("--port", type=int, metavar="N", help="port of the live page (default: a free one)")
    args = parser.parse_strictly(sys.argv[1:], "give run directories, and --out FILE")
    if not args.folders:
        raise ConfigError("no run given; give its directory: python -m nash_mhc.report runs/tiny-20260101-120000")
    if args.live and args.out:
        raise ConfigError("--live writes no file; leave out --out or --live")
    if args.port is not None and not args.live:
        raise ConfigError("--port needs --live; add --live or leave out --port")
    runs = [open_run(folder) for folder in args.folders]
    if args.live:
        with LiveServer(args.folders, args.port or 0) as server:
            print(f"live: {server.address} (Ctrl-C to stop)", flush=True)
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt:
                print()
        return 0
    out = to_path(args.out) if args.out else runs[0].folder / "report.html"
    write_page(runs, out)
    _show(runs)
    print(f"report: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
