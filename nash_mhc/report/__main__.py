"""`python -m nash_mhc.report DIR [DIR ...]`: the files of runs -> one HTML page, and a summary on the terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from nash_mhc.config.commands import OneLineParser, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError
from nash_mhc.report.contents import Run, facts, in_words, open_run, remembered
from nash_mhc.report.live import LiveServer
from nash_mhc.report.page import write_page
from nash_mhc.storage.files import to_path


def _show(runs: list[Run]) -> None:
    if len(runs) == 1:
        for name, text in (facts(runs[0]) | remembered(runs[0])).items():
            print(f"{name:<32} {text}")
    else:
        found = [facts(run) | remembered(run) for run in runs]
        table = Table("", *(run.name for run in runs))
        for name in dict.fromkeys(name for each in found for name in each):
            table.add_row(name, *(each.get(name, "") for each in found))
        Console().print(table)
    for run in runs:
        print(in_words(run) if len(runs) == 1 else f"{run.name}: {in_words(run)}")
        if len(run.rows) < 2:
            print(f"the run has {len(run.rows) or 'no'} row{'s' * (not run.rows)} of metrics so far: the charts say little yet")


def main() -> int:
    parser = OneLineParser(
        prog="python -m nash_mhc.report", allow_abbrev=False, description="One HTML page about a run, or about several."
    )
    parser.add_argument(
        "folders", nargs="*", type=run_path, metavar="DIR", help="run directory; several are shown side by side"
    )
    parser.add_argument("--out", type=run_path, metavar="FILE", help="output file (default: report.html in the first DIR)")
    parser.add_argument("--live", action="store_true", help="serve the page with the newest rows until Ctrl-C")
    parser.add_argument("--port", type=int, metavar="N", help="port of the live page (default: a free one)")
    args = parser.parse_strictly(sys.argv[1:], "give folders of runs, and --out FILE")
    if not args.folders:
        raise ConfigError("which run? Give its folder: python -m nash_mhc.report runs/tiny-20260101-120000")
    if args.live and args.out:
        raise ConfigError("--live writes no file; leave out --out, or --live")
    if args.port is not None and not args.live:
        raise ConfigError("--port is that of the live page; add --live")
    runs = [open_run(folder) for folder in args.folders]
    if args.live:
        with LiveServer(args.folders, args.port or 0) as server:
            print(f"live: {server.address} (Ctrl-C ends it)", flush=True)
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
