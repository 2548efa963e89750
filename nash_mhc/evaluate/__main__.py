"""`python -m nash_mhc.evaluate DIR --tasks A,B`: how good a model is, by public tasks and by held-out text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nash_mhc.config.commands import OneLineParser, local_path, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError, MeshConfig, RunConfig, check_field
from nash_mhc.evaluate import harness
from nash_mhc.evaluate.table import Row, rows_of, table, write_json
from nash_mhc.storage.files import is_remote, to_path

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nash_mhc.evaluate.progress import Progress
    from nash_mhc.hub.load import Loaded

# flag -> (bounds as in the schema, default, help)
_OPTIONS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "--batch-size": ({"low": 1}, 8, "rows of one forward pass over all devices; a multiple of mesh-data x mesh-fsdp"),
    "--limit": ({"low": 1}, None, "only the first INT documents of a task, or rows of stories, held_out and bytes:FILE"),
    "--num-fewshot": ({"low": 0}, None, "examples before each question (default: as many as the task says)"),
    "--step": ({"low": 0}, None, "checkpoint to use (default: the one that the run ends with)"),
    "--mesh-data": ({"low": -1}, 1, "devices along data: whole copies, each with its share of the batch (-1: the rest)"),
    "--mesh-fsdp": ({"low": -1}, 1, "devices along fsdp: batch and parameters are split (-1: the rest)"),
    "--mesh-tp": ({"low": -1}, 1, "devices along tp: heads, ffn and vocabulary are split (-1: the rest)"),
    "--num-devices": ({"low": 1}, None, "use only this many of the devices there are"),
}
_ABOUT = """Evaluates a model: tasks of lm-evaluation-harness and held-out text, on one device or a mesh. Texts that a task
wants to be written (generate_until) are written one after the other on one device, which has to hold all weights."""
_TASKS = """names, separated by commas: a task of lm-evaluation-harness, a .yaml file or a folder of them; stories, the
built-in text, with its floor; bytes:FILE, bits a byte of a text file; held_out, what the run holds out of its own data,
by its own objective (of puzzles: how many are solved, after how many passes)"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """ConfigError on any mistake; --help prints and exits with 0."""
    parser = OneLineParser(prog="python -m nash_mhc.evaluate", allow_abbrev=False, description=_ABOUT)
    parser.add_argument("folder", type=run_path, metavar="DIR", help="run directory or Hugging Face folder")
    parser.add_argument("--tasks", metavar="A,B", help=_TASKS)
    for flag, (_, default, text) in _OPTIONS.items():
        note = "" if default is None else f" [{default}]"
        parser.add_argument(flag, type=int, default=default, metavar="INT", help=text + note)
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_strictly(argv, "tasks are named after --tasks, with commas between them")
    for flag, (bounds, default, _) in _OPTIONS.items():
        check_field(flag, getattr(args, flag[2:].replace("-", "_")), int | None if default is None else int, bounds)
    args.tasks = list(dict.fromkeys(name.strip() for name in (args.tasks or "").split(",") if name.strip()))
    if not args.tasks:
        raise ConfigError("which tasks? For instance --tasks stories, --tasks bytes:README.md, --tasks arc_easy,hellaswag")
    args.mesh = MeshConfig(data=args.mesh_data, fsdp=args.mesh_fsdp, tp=args.mesh_tp, num_devices=args.num_devices)
    if args.json and not Path(args.json).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: no such folder")
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    texts, named = _sorted(args.tasks)
    import jax  # after the flags: a typo is reported without it

    try:
        return _run(args, texts, named)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        less = f"--batch-size {args.batch_size // 2}, or " if args.batch_size > 1 else ""
        raise ConfigError(
            f"the devices have too little memory; try {less}more of them along --mesh-fsdp or --mesh-tp"
        ) from None


def _run(args: argparse.Namespace, texts: dict[str, str], named: list[str]) -> int:
    import jax

    from nash_mhc.evaluate.progress import Progress
    from nash_mhc.hub.load import config_of, load
    from nash_mhc.parallel.mesh import describe, make_mesh
    from nash_mhc.parallel.processes import check_same, start
    from nash_mhc.runtime.compiled import use_compilation_cache

    cfg = config_of(args.folder)
    if start(args.mesh) > 1:
        check_same({f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items()})
    mesh = make_mesh(args.mesh)
    progress = Progress(quiet=jax.process_index() > 0)
    _check_fit(cfg, mesh, args.batch_size)
    tasks = {task.name: task for task in harness.load_tasks(named, progress.say)} if named else {}
    if is_remote(args.folder) or (Path(args.folder) / "run.json").exists():
        use_compilation_cache(to_path(args.folder))
    loaded = load(args.folder, args.step, mesh=mesh, say=progress.say)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    try:
        for found, more in _evaluate(args, texts, tasks, loaded, mesh, progress):
            rows += found
            details |= more
    finally:  # what has been found is shown, whatever comes after it
        if rows and jax.process_index() == 0:
            print(f"{args.folder}{f', step {loaded.step}' * bool(loaded.step)}, {loaded.dtype}, {describe(mesh)}\n")
            print(table(rows))
            if args.json:
                about = {"folder": args.folder, "step": loaded.step, "dtype": loaded.dtype, "mesh": dict(mesh.shape),
                         "batch_size": args.batch_size, "limit": args.limit, "num_fewshot": args.num_fewshot}  # fmt: skip
                write_json(Path(args.json).expanduser(), about, rows, details)
    return 0


def _sorted(names: list[str]) -> tuple[dict[str, str], list[str]]:
    """(the texts of those that are bytes:FILE, those that are lm-eval's); ConfigError for what can be seen at once."""
    from nash_mhc.evaluate.names import BYTES, HELD_OUT, STORIES, read_text

    texts = {name: read_text(name) for name in names if name.startswith(BYTES)}
    named = [name for name in names if name not in (STORIES, HELD_OUT) and name not in texts]
    for name in named:
        if harness.is_path(name):
            harness.check_path(name)
    if named:
        harness.check_installed()
    return texts, named


def _check_fit(cfg: RunConfig, mesh: Mesh, batch_size: int) -> None:
    """ConfigError for a model or a batch that the mesh does not divide."""
    from nash_mhc.evaluate.scoring import row_unit
    from nash_mhc.parallel.mesh import check_fit

    unit = row_unit(cfg.model.alignment, mesh)
    data = dataclasses.replace(cfg.data, batch_size=batch_size, seq_len=-(-cfg.data.seq_len // unit) * unit)
    check_fit(dataclasses.replace(cfg, data=data), mesh.shape, model_is_given=True)


def _evaluate(
    args: argparse.Namespace,
    texts: dict[str, str],
    tasks: dict[str, harness.Task],
    loaded: Loaded,
    mesh: Mesh,
    progress: Progress,
) -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """Of each name of --tasks, in their order: (what was found, what else lm-eval tells)."""
    from nash_mhc.evaluate.held_out import of_the_run, stories, text_file
    from nash_mhc.evaluate.names import HELD_OUT
    from nash_mhc.evaluate.scoring import Scorer

    scorer = Scorer(
        loaded.model, mesh, longest=loaded.config.data.seq_len, batch_size=args.batch_size, dtype=loaded.dtype,
        say=progress.say,
    )  # fmt: skip
    model = None
    for name in args.tasks:
        if name in texts:
            figures = text_file(name, texts[name], loaded, scorer, limit=args.limit, progress=progress)
            yield rows_of(name, figures), {}
        elif name == HELD_OUT:
            figures = of_the_run(loaded, mesh, batch_size=args.batch_size, limit=args.limit, progress=progress)
            yield rows_of(name, figures), {}
        elif name not in tasks:
            figures = stories(loaded, mesh, batch_size=args.batch_size, limit=args.limit, progress=progress)
            yield rows_of(name, figures), {}
        else:
            from nash_mhc.evaluate.harness_model import HarnessModel

            model = model or HarnessModel(loaded, scorer, progress)
            found = harness.run_task(tasks[name], model, limit=args.limit, num_fewshot=args.num_fewshot)
            yield [row for task, figures in found.figures.items() for row in rows_of(task, figures)], {name: found.details}


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
