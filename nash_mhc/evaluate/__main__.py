"""`python -m nash_mhc.evaluate DIR --tasks A,B`: evaluate a model on public tasks and held-out text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, file_to_write, local_path, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError, MeshConfig, check_field
from nash_mhc.evaluate import tasks
from nash_mhc.evaluate.tasks import BYTES, HELD_OUT, STORIES
from nash_mhc.storage.files import is_remote, to_path

_HEAD = ("task", "metric", "value", "stderr")
# flag -> (lowest value, default, help)
_OPTIONS: dict[str, tuple[int, int | None, str]] = {
    "--batch-size": (1, 8, "sequences per forward pass over all devices; a multiple of mesh-data x mesh-fsdp"),
    "--limit": (1, None, "number of documents per task (for stories, held_out and bytes:FILE: number of sequences)"),
    "--num-fewshot": (0, None, "number of examples before each question (default: set by the task)"),
    "--step": (0, None, "checkpoint to use (default: the run's final one)"),
    "--mesh-data": (-1, 1, "number of data-parallel replicas; -1: fill the remaining devices"),
    "--mesh-fsdp": (-1, 1, "devices to split the parameters and the batch over; -1: fill the remaining devices"),
    "--mesh-tp": (-1, 1, "devices to split heads, MLP and vocabulary over; -1: fill the remaining devices"),
    "--num-devices": (1, None, "maximum number of devices (default: 1 without --mesh flags, else all); a CPU emulates devices"),
}
_ABOUT = """Evaluate a model on tasks of lm-evaluation-harness and held-out text, on one device or a mesh. Generation tasks
(generate_until) run on one device, which must hold all weights."""
_TASKS = """comma-separated tasks: names of lm-evaluation-harness; task files (.yaml) or folders of them; stories (built-in
text with a known loss floor); bytes:FILE (bits per byte of a text file); held_out (the run's own data and objective)"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; raise ConfigError for any mistake."""
    parser = OneLineParser(prog="python -m nash_mhc.evaluate", allow_abbrev=False, description=_ABOUT)
    parser.add_argument("folder", type=run_path, metavar="DIR", help="run directory or Hugging Face folder")
    parser.add_argument("--tasks", metavar="A,B", help=_TASKS)
    for flag, (_, default, text) in _OPTIONS.items():
        note = "" if default is None else f" [{default}]"
        parser.add_argument(flag, type=int, default=default, metavar="INT", help=text + note)
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results to this file")
    logs.add_flag(parser)
    args = parser.parse_strictly(argv, "give tasks with --tasks, separated by commas")
    for flag, (low, default, _) in _OPTIONS.items():
        check_field(flag, getattr(args, flag[2:].replace("-", "_")), int | None if default is None else int, {"low": low})
    args.tasks = list(dict.fromkeys(name.strip() for name in (args.tasks or "").split(",") if name.strip()))
    if not args.tasks:
        raise ConfigError("no tasks given; try --tasks stories, --tasks bytes:README.md or --tasks arc_easy,hellaswag")
    args.mesh = MeshConfig(data=args.mesh_data, fsdp=args.mesh_fsdp, tp=args.mesh_tp, num_devices=args.num_devices)
    args.json = file_to_write("--json", args.json)
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    logs.configure(args.log_level)
    texts, harness_names = _split_names(args.tasks)
    import jax  # not before the flags are checked

    try:
        return _run(args, texts, harness_names)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        smaller = f"--batch-size {args.batch_size // 2}, or " if args.batch_size > 1 else ""
        raise ConfigError(f"out of device memory; try {smaller}more devices along --mesh-fsdp or --mesh-tp") from None


def _run(args: argparse.Namespace, texts: dict[str, str], harness_names: list[str]) -> int:
    import jax

    from nash_mhc.evaluate.scoring import Scorer, held_out, length_multiple, stories, text_file
    from nash_mhc.loading.load import config_of, load
    from nash_mhc.parallel.board import check_settings_agree
    from nash_mhc.parallel.mesh import check_fit, describe, make_mesh
    from nash_mhc.parallel.processes import start
    from nash_mhc.runtime.compiled import use_compilation_cache

    cfg = config_of(args.folder)
    if start(args.mesh) > 1:
        check_settings_agree(
            {f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items() if name != "log_level"}
        )
    mesh = make_mesh(args.mesh)
    if jax.process_index() > 0:
        logs.silence()
    multiple = length_multiple(cfg.model.alignment, mesh)
    data = dataclasses.replace(cfg.data, batch_size=args.batch_size, seq_len=-(-cfg.data.seq_len // multiple) * multiple)
    check_fit(data, cfg.model, mesh.shape, resizable=())
    loaded_tasks = {task.name: task for task in tasks.load_tasks(harness_names)} if harness_names else {}
    if is_remote(args.folder) or (Path(args.folder) / "run.json").exists():
        use_compilation_cache(to_path(args.folder))
    loaded = load(args.folder, args.step, mesh=mesh)
    scorer = Scorer(loaded.model, mesh, longest=loaded.config.data.seq_len, batch_size=args.batch_size, dtype=loaded.dtype)
    rows, details = list[Row](), dict[str, Any]()
    harness: Any = None
    try:
        for name in args.tasks:
            if name in loaded_tasks:
                from nash_mhc.evaluate.harness_model import HarnessModel

                harness = harness or HarnessModel(loaded, scorer)
                results = tasks.run_task(loaded_tasks[name], harness, limit=args.limit, num_fewshot=args.num_fewshot)
                rows += [row for task, figures in results.figures.items() for row in to_rows(task, figures)]
                details[name] = results.details
            elif name in texts:
                rows += to_rows(name, text_file(name, texts[name], loaded, scorer, limit=args.limit))
            else:
                evaluate = held_out if name == HELD_OUT else stories
                rows += to_rows(name, evaluate(loaded, mesh, batch_size=args.batch_size, limit=args.limit))
    finally:  # show the results so far, even after an error
        if rows and jax.process_index() == 0:
            print(f"{args.folder}{f', step {loaded.step}' * bool(loaded.step)}, {loaded.dtype}, {describe(mesh)}\n")
            print(table(rows))
            if args.json:
                settings = {"folder": args.folder, "step": loaded.step, "dtype": loaded.dtype, "mesh": dict(mesh.shape),
                         "batch_size": args.batch_size, "limit": args.limit, "num_fewshot": args.num_fewshot}  # fmt: skip
                write_json(args.json, settings, rows, details)
    return 0


def _split_names(names: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the texts of bytes:FILE names and the names of lm-eval tasks, after checks that need no imports."""
    texts = {name: tasks.read_text(name) for name in names if name.startswith(BYTES)}
    harness_names = [name for name in names if name not in (STORIES, HELD_OUT) and name not in texts]
    for name in harness_names:
        if tasks.is_path(name):
            tasks.check_path(name)
    if harness_names:
        tasks.check_installed()
    return texts, harness_names


# --- the results -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    task: str
    metric: str
    value: int | float  # int: a count
    stderr: float | None = None


def to_rows(task: str, figures: Mapping[str, Any]) -> list[Row]:
    """Convert figures by plain name, or by lm-eval's `metric,filter` and `metric_stderr,filter`."""
    rows = []
    for name, value in figures.items():
        metric, _, filter_name = name.partition(",")
        if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        stderr = figures.get(f"{metric}_stderr,{filter_name}")
        label = metric if filter_name in ("", "none") else f"{metric} ({filter_name})"
        rows.append(Row(task, label, value, float(stderr) if isinstance(stderr, int | float) else None))
    return [row for row in rows if row.metric not in ("sample_len", "sample_count")]


def table(rows: Sequence[Row]) -> str:
    """Return plain text columns; a task is named in its first row only."""
    cells = [_HEAD]
    for previous, row in zip([None, *rows], rows, strict=False):
        task = "" if previous is not None and previous.task == row.task else row.task
        cells.append((task, row.metric, _number(row.value), "-" if row.stderr is None else _number(row.stderr)))
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if math.isfinite(value) and abs(value) < 1e6 else f"{value:.4g}"


def write_json(path: Path, settings: Mapping[str, Any], rows: Sequence[Row], details: Mapping[str, Any]) -> None:
    finite = lambda value: value if value is not None and math.isfinite(value) else None  # JSON has no NaN
    tasks: dict[str, dict[str, Any]] = {}
    for row in rows:
        tasks.setdefault(row.task, {})[row.metric] = {"value": finite(row.value), "stderr": finite(row.stderr)}
    text = json.dumps({**settings, "tasks": tasks, "lm_eval": details}, indent=2, default=str)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
