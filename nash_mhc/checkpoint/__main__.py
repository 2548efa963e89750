"""`python -m nash_mhc.checkpoint list | inspect | verify DIR`: look at checkpoints on any machine."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from nash_mhc.checkpoint import manifest
from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.config.commands import OneLineParser, chosen_command, module_command, one_line_errors, run_path
from nash_mhc.config.schema import ConfigError
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error
from nash_mhc.storage.files import Folder, number, table, to_path

ABOUT = {
    "list": "list all checkpoints with size, held-out loss and state",
    "inspect": "show a checkpoint: metrics, manifest hash, and the shape of every array",
    "verify": "compare every file with its hash; exit code 1 if any differs",
}
USAGE = f"python -m nash_mhc.checkpoint {' | '.join(ABOUT)} DIR"


def _folder(name: str) -> Folder:
    """Return the folder of numbered checkpoints in a run directory, or `name` itself if it is one."""
    folder = to_path(name)
    with as_config_error(name):
        exists = files.exists(folder, kind="directory")
    if not exists:
        raise ConfigError(f"{folder}: no such folder; give a run directory, such as runs/tiny-20260101-120000")
    inside = RunFolder(folder).checkpoints
    folder = inside if files.exists(inside, kind="directory") else folder
    if not any(_is_step(name) for name in files.subfolders(folder)):
        raise ConfigError(
            f"{folder}: contains no checkpoint; a run saves its first one after --checkpoint-interval steps or at its end"
        )
    return folder


def _is_step(name: str) -> bool:
    """Return whether a folder name is that of a checkpoint, complete or not."""
    return manifest.step_of(name.partition(".")[0]) is not None


def _steps(folder: Folder, wanted: int | None) -> list[int]:
    steps = manifest.saved_steps(folder)
    if wanted is not None and wanted not in steps:
        raise ConfigError(
            f"--step {wanted}: {folder} has no such checkpoint; its checkpoints: {', '.join(map(str, steps)) or 'none'}"
        )
    return steps if wanted is None else [wanted]


def _size(checkpoint: Folder) -> str:
    size, units = float(sum(files.sizes(checkpoint).values())), "BKMGTP"
    power = min(int(math.log(max(size, 1), 1000)), len(units) - 1)
    return f"{size / 1000**power:.{min(power, 1)}f} {units[power]}{'B' * (power > 0)}"


def _state(folder: Folder, name: str) -> str:
    """Return the state of a checkpoint as far as file names show it."""
    if name.endswith((".damaged", ".unfinished")):
        return name.partition(".")[2] + ", renamed"
    if files.exists(folder / name / manifest.FILE):
        return "complete"
    is_partial = "." in name or files.exists(folder / f"{name}.saving")
    return "being saved, or interrupted" if is_partial else "no manifest"


def list_command(folder: Folder, step: int | None) -> int:
    _steps(folder, step)
    names = [n for n in files.subfolders(folder) if _is_step(n) and (step is None or n.partition(".")[0] == str(step))]
    losses = {name: manifest.held_out_loss(folder / name) for name in names}
    best = manifest.best_of({int(name): loss for name, loss in losses.items() if "." not in name})
    lines = [("step", "size", "tokens seen", "held-out loss", "saved", "state")]
    for name in sorted(names, key=lambda n: (int(n.partition(".")[0]), n)):
        checkpoint, loss = folder / name, losses[name]
        tokens = number(manifest.read_values(checkpoint), "tokens_seen")
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(files.modified_at(checkpoint)))
        shown = "-" if math.isinf(loss) else f"{loss:.4f}{' (best)' * (name == str(best))}"
        lines.append((name, _size(checkpoint), "-" if tokens is None else f"{tokens:,.0f}", shown, saved, _state(folder, name)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("\n".join("  ".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=True)).rstrip() for line in lines))
    return 0


def _lines(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each leaf of nested JSON values."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{name}/")
        else:
            rounded = json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))
            yield prefix + name, json.dumps(rounded)


def _last(folder: Folder, wanted: int | None) -> Folder:
    steps = _steps(folder, wanted)
    if not steps:
        command = module_command("nash_mhc.checkpoint", "list", str(folder))
        raise ConfigError(f"{folder}: contains only unusable checkpoints; list them with {command}")
    return folder / str(steps[-1])


def inspect_command(folder: Folder, step: int | None) -> int:
    checkpoint = _last(folder, step)
    if wrong := manifest.problem(checkpoint):
        raise ConfigError(f"{checkpoint}: damaged or incomplete ({wrong}); inspect another checkpoint with --step")
    from nash_mhc.checkpoint.store import array_metadata  # deferred: imports JAX, which the other commands do not need

    count, values = len(manifest.read(checkpoint)), manifest.read_values(checkpoint)
    print(f"{checkpoint}: {_size(checkpoint)} in {count} files, complete; manifest {manifest.identity(checkpoint)}")
    evaluation = table(values, "evaluation")  # whose names start with eval/
    shown = {k: v for k, v in values.items() if k not in ("config", "evaluation")} | evaluation
    print("\n".join(f"{name}: {value}" for name, value in _lines(shown)))
    arrays = array_metadata(checkpoint)
    width = max(map(len, arrays))
    for name, (shape, dtype) in arrays.items():
        print(f"  {name:<{width}}  {dtype}[{','.join(map(str, shape))}]")
    parameters = sum(math.prod(shape) for name, (shape, _) in arrays.items() if name.startswith("model."))
    print(f"{len(arrays)} arrays; {parameters:,} parameters in the model")
    return 0


def verify_command(folder: Folder, step: int | None) -> int:
    damaged = False
    for checkpoint in (folder / str(each) for each in _steps(folder, step)):
        start = time.monotonic()
        if problem := manifest.problem(checkpoint):
            damaged = True
            print(f"{checkpoint.name}: {problem}", flush=True)
        else:
            print(f"{checkpoint.name}: complete ({_size(checkpoint)} read in {time.monotonic() - start:.1f} s)", flush=True)
    return 1 if damaged or not manifest.saved_steps(folder) else 0


COMMANDS = {"list": list_command, "inspect": inspect_command, "verify": verify_command}


def parse(command: str, argv: Sequence[str]) -> tuple[Folder, int | None]:
    parser = OneLineParser(prog=f"python -m nash_mhc.checkpoint {command}", allow_abbrev=False, description=ABOUT[command])
    parser.add_argument("folder", type=run_path, metavar="DIR", nargs="?", help="run directory")
    default = "latest" if command == "inspect" else "all"
    parser.add_argument("--step", type=int, metavar="K", help=f"checkpoint step [{default}]")
    args = parser.parse_strictly(argv, "give only one folder")
    if not args.folder:
        raise ConfigError("no run directory given; add one, such as runs/tiny-20260101-120000")
    return _folder(args.folder), args.step


def main() -> int:
    if (chosen := chosen_command(ABOUT, USAGE)) is None:
        return 0
    command, argv = chosen
    return COMMANDS[command](*parse(command, argv))


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
