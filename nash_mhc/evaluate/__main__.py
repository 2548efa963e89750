"""`python -m nash_mhc.evaluate DIR --tasks A,B`: evaluate a model on public tasks and held-out text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nash_mhc.config import logs
from nash_mhc.config.commands import OneLineParser, local_path, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError, MeshConfig, check_field
from nash_mhc.evaluate import tasks
from nash_mhc.evaluate.output import Progress, Row, table, to_rows, write_json
from nash_mhc.evaluate.tasks import BYTES, HELD_OUT, STORIES
from nash_mhc.storage.files import is_remote, to_path

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nash_mhc.hub.load import Loaded

# flag -> (bounds, default, help)
_OPTIONS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "--batch-size": ({"low": 1}, 8, "sequences per forward pass over all devices; a multiple of mesh-data x mesh-fsdp"),
    "--limit": ({"low": 1}, None, "only the first INT documents of a task, or sequences of stories, held_out and bytes:FILE"),
    "--num-fewshot": ({"low": 0}, None, "examples before each question (default: the task's number)"),
    "--step": ({"low": 0}, None, "checkpoint to use (default: the run's final one)"),
    "--mesh-data": ({"low": -1}, 1, "devices along data, which splits the batch; -1: all remaining"),
    "--mesh-fsdp": ({"low": -1}, 1, "devices along fsdp, which splits batch and parameters; -1: all remaining"),
    "--mesh-tp": ({"low": -1}, 1, "devices along tp, which splits heads, MLP and vocabulary; -1: all remaining"),
    "--num-devices": ({"low": 1}, None, "use only this many devices (default: all)"),
}
_ABOUT = """Evaluate a model on tasks of lm-evaluation-harness and held-out text, on one device or a mesh. Generation tasks
(generate_until) run on one device, which must hold all weights."""
_TASKS = """comma-separated: a task of lm-evaluation-harness; a .yaml file or a folder of them; stories (built-in text, with its
loss floor); bytes:FILE (bits per byte of a text file); held_out (the run's own held-out data and objective)"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; ConfigError for any mistake."""
    parser = OneLineParser(prog="python -m nash_mhc.evaluate", allow_abbrev=False, description=_ABOUT)
    parser.add_argument("folder", type=run_path, metavar="DIR", help="run directory or Hugging Face folder")
    parser.add_argument("--tasks", metavar="A,B", help=_TASKS)
    for flag, (_, default, text) in _OPTIONS.items():
        note = "" if default is None else f" [{default}]"
        parser.add_argument(flag, type=int, default=default, metavar="INT", help=text + note)
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results to this file")
    logs.add_flag(parser)
    args = parser.parse_strictly(argv, "give tasks with --tasks, separated by commas")
    for flag, (bounds, default, _) in _OPTIONS.items():
        check_field(flag, getattr(args, flag[2:].replace("-", "_")), int | None if default is None else int, bounds)
    args.tasks = list(dict.fromkeys(name.strip() for name in (args.tasks or "").split(",") if name.strip()))
    if not args.tasks:
        raise ConfigError("no tasks given; try --tasks stories, --tasks bytes:README.md or --tasks arc_easy,hellaswag")
    args.mesh = MeshConfig(data=args.mesh_data, fsdp=args.mesh_fsdp, tp=args.mesh_tp, num_devices=args.num_devices)
    if args.json and not Path(args.json).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: no such folder")
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

    from nash_mhc.evaluate.scoring import length_multiple
    from nash_mhc.hub.load import config_of, load
    from nash_mhc.parallel.board import check_same
    from nash_mhc.parallel.mesh import check_fit, describe, make_mesh
    from nash_mhc.parallel.processes import start
    from nash_mhc.runtime.compiled import use_compilation_cache

    cfg = config_of(args.folder)
    if start(args.mesh) > 1:
        check_same({f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items() if name != "log_level"})
    mesh = make_mesh(args.mesh)
    progress = Progress(quiet=jax.process_index() > 0)
    if jax.process_index() > 0:
        logs.silence()
    multiple = length_multiple(cfg.model.alignment, mesh)
    data = dataclasses.replace(cfg.data, batch_size=args.batch_size, seq_len=-(-cfg.data.seq_len // multiple) * multiple)
    check_fit(data, cfg.model, mesh.shape, resizable=())
    loaded_tasks = {task.name: task for task in tasks.load_tasks(harness_names)} if harness_names else {}
    if is_remote(args.folder) or (Path(args.folder) / "run.json").exists():
        use_compilation_cache(to_path(args.folder))
    loaded = load(args.folder, args.step, mesh=mesh)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    try:
        for task_rows, task_details in _evaluate(args, texts, loaded_tasks, loaded, mesh, progress):
            rows += task_rows
            details |= task_details
    finally:  # show the results so far, even after an error
        if rows and jax.process_index() == 0:
            print(f"{args.folder}{f', step {loaded.step}' * bool(loaded.step)}, {loaded.dtype}, {describe(mesh)}\n")
            print(table(rows))
            if args.json:
                settings = {"folder": args.folder, "step": loaded.step, "dtype": loaded.dtype, "mesh": dict(mesh.shape),
                         "batch_size": args.batch_size, "limit": args.limit, "num_fewshot": args.num_fewshot}  # fmt: skip
                write_json(Path(args.json).expanduser(), settings, rows, details)
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


def _evaluate(
    args: argparse.Namespace,
    texts: dict[str, str],
    loaded_tasks: dict[str, tasks.Task],
    loaded: Loaded,
    mesh: Mesh,
    progress: Progress,
) -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """Yield (rows of the table, details of lm-eval) for each name of --tasks."""
    from nash_mhc.evaluate.held_out import held_out, stories, text_file
    from nash_mhc.evaluate.scoring import Scorer

    scorer = Scorer(loaded.model, mesh, longest=loaded.config.data.seq_len, batch_size=args.batch_size, dtype=loaded.dtype)
    model = None
    for name in args.tasks:
        if name in loaded_tasks:
            from nash_mhc.evaluate.harness_model import HarnessModel

            model = model or HarnessModel(loaded, scorer, progress)
            results = tasks.run_task(loaded_tasks[name], model, limit=args.limit, num_fewshot=args.num_fewshot)
            rows = [row for task, figures in results.figures.items() for row in to_rows(task, figures)]
            yield rows, {name: results.details}
            continue
        if name in texts:
            figures = text_file(name, texts[name], loaded, scorer, limit=args.limit, progress=progress)
        else:
            evaluate = held_out if name == HELD_OUT else stories
            figures = evaluate(loaded, mesh, batch_size=args.batch_size, limit=args.limit, progress=progress)
        yield to_rows(name, figures), {}


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
