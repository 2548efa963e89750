"""The folder of a run: what lies where in it, and the one way to read it and to write it. No jax: it is read anywhere.

run.json          what the run is: configuration, data, devices, versions
parameters.txt    name, shape and size of every parameter
metrics.jsonl     a row every log interval          eval.jsonl    a row an evaluation
result.json       what a fine-tuning run came to: its checkpoint, the test, questions before and after
checkpoints/      one saved_steps folder a checkpoint (store.py)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nash_mhc.checkpoint.manifest import FILE, best_of, held_out_loss, read_values, saved_steps, step_of
from nash_mhc.config import kits
from nash_mhc.config.recorded import leaves, taken_over
from nash_mhc.config.schema import ConfigError, ModelConfig, RunConfig, section_classes
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error, as_os_errors, reason
from nash_mhc.storage.files import Folder, is_remote, to_path
from nash_mhc.storage.json_files import MALFORMED, parse_json, read_json, reading

RUN, PARAMETERS, METRICS, EVALUATIONS, CHECKPOINTS = (
    "run.json", "parameters.txt", "metrics.jsonl", "eval.jsonl", "checkpoints",
)  # fmt: skip
RESULT = "result.json"
ROW_FILES = (METRICS, EVALUATIONS)
Row = dict[str, Any]  # numbers, or lists of them (one entry a layer), by name


def row_of(line: bytes) -> Row | None:
    """The row in a line of one of ROW_FILES; None where the line is damaged."""
    with contextlib.suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict) and type(step := row.get("step")) is int and step_of(str(step)) is not None:
            return row
    return None


class Description(NamedTuple):
    """What a run has written down about itself, as far as whoever goes on with it needs it."""

    config: dict[str, Any]  # section.key -> value
    rows: str | None  # identity of the rows that it reads
    history: list[dict[str, Any]]  # settings that were changed on the way
    init_from: dict[str, Any] | None  # whose weights it began with
    wandb: dict[str, Any] | None = None  # project and id of its run at Weights & Biases
    drawn: dict[str, Any] | None = None  # what its model has from a seed
    commands: tuple[str, ...] = ()  # of its starts, as they were typed


def _object(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The object of that name, or None; TypeError for anything else, and for a folder that is not text."""
    value = values.get(name)
    if value is not None and not (isinstance(value, dict) and isinstance(value.get("folder", ""), str)):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value


class RunFolder:
    """`path` may be on this machine or in an object store. Nothing is read, made or checked until it is asked for."""

    def __init__(self, name: str | Folder) -> None:
        self.path = to_path(name)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def checkpoints(self) -> Folder:
        return self.path / CHECKPOINTS

    def exists(self) -> bool:
        with as_config_error(self.path):
            return files.exists(self.path, kind="directory")

    # --- what the run says about itself ------------------------------------------------------------------------------

    def info(self, *, hint: str = ", the --checkpoint-dir that it trained with") -> dict[str, Any]:
        """run.json as it stands; ConfigError for a folder that is no run's."""
        if not self.exists():
            raise ConfigError(f"{self.path}: no such folder; give the folder of a run{hint}")
        with as_config_error(self.path):
            found = files.exists(self.path / RUN)
        if not found:
            raise ConfigError(f"{self.path} has no {RUN}, so it is not the folder of a run (has the run started yet?)")
        return read_json(self.path / RUN, "bring it back from a copy")

    def config(self, **hint: str) -> RunConfig:
        """The run's own configuration; ConfigError where there is none that this version can read."""
        info, path = self.info(**hint), self.path / RUN
        with reading(path, "it holds no configuration of a run"):
            try:
                return RunConfig.from_dict(_configured(info))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None

    def description(self) -> Description | None:
        """By run.json, or else by the newest checkpoint that can say it; None:
        there is no run, or nothing of it is usable."""
        try:
            info = parse_json((self.path / RUN).read_bytes())
            config, history = _usable(flatten_config(_configured(info))), list(info.get("history", []))
            commands = tuple(map(str, info.get("commands", ())))
            init_from, wandb, drawn = (_object(info, name) for name in ("init_from", "wandb", "drawn"))
            return Description(config, str(info["rows"]), history, init_from, wandb, drawn, commands)
        except (OSError, *MALFORMED):
            pass  # lost or damaged: every checkpoint knows it as well
        for step in reversed(self.steps()):
            values = read_values(self.checkpoints / str(step))
            try:
                return Description(
                    _usable(flatten_config(values["config"])), str(values["data"]["rows"]), [], _object(values, "base")
                )
            except MALFORMED:
                continue
        return None

    def settings(self) -> dict[str, Any]:
        """What the next start takes over of the settings, section.key -> value; empty where they cannot be read."""
        with contextlib.suppress(OSError, *MALFORMED):
            info = parse_json((self.path / RUN).read_bytes())
            as_asked = "settings" in info
            return taken_over(leaves(info["settings" if as_asked else "config"]), as_asked=as_asked)
        described = self.description()
        return {} if described is None else taken_over(described.config, as_asked=False)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to continue from, or one that could be brought back."""
        return bool(self.finished()) or any(name.endswith(".damaged") for name in self.set_aside())

    def is_imported(self) -> bool:
        """Whether it holds a model that came from elsewhere, and no run."""
        with contextlib.suppress(ConfigError):
            return "imported" in read_json(self.path / RUN)
        return False

    def result(self) -> dict[str, Any]:
        """What result.json says; empty where there is none, or none that can be read."""
        with contextlib.suppress(ConfigError):
            return read_json(self.path / RESULT)
        return {}

    # --- rows and checkpoints ----------------------------------------------------------------------------------------

    def rows(self, name: str = METRICS) -> list[Row]:
        """Every row of one of ROW_FILES; ConfigError for a line that is none.
        The last may be being written just now."""
        path = self.path / name
        with as_config_error(path):
            lines = path.read_bytes().splitlines() if files.exists(path) else []
        rows: list[Row] = []
        for number, line in enumerate(lines, start=1):
            if (row := row_of(line)) is not None:
                rows.append(with_current_names(row))
            elif number < len(lines):
                raise ConfigError(f"{path}:{number}: not a row of JSON with a step; mend or remove the line")
        return rows

    def last_row(self) -> Row:
        """The last whole row of metrics; empty where there is none, or none that can be read."""
        with contextlib.suppress(OSError), as_os_errors():
            rows = map(row_of, reversed((self.path / METRICS).read_bytes().splitlines()))
            return next((row for row in rows if row is not None), {})
        return {}

    def completed_at(self, step: int) -> float | None:
        """When that checkpoint was whole, in seconds since the epoch; None where it is not."""
        path = self.checkpoints / str(step) / FILE
        with contextlib.suppress(OSError), as_os_errors():
            return files.modified_at(path) if files.exists(path) else None
        return None

    def steps(self) -> list[int]:
        """Steps with a checkpoint, whole or not, oldest first."""
        return saved_steps(self.checkpoints)

    def finished(self) -> list[int]:
        """Those of them whose save has ended."""
        ended = lambda step: (
            files.exists(self.checkpoints / str(step) / FILE) or not files.exists(self.checkpoints / f"{step}.saving")
        )
        return [step for step in self.steps() if ended(step)]

    def best_step(self) -> int | None:
        """Of the checkpoints that were evaluated, the one with the lowest held-out loss."""
        return best_of({step: held_out_loss(self.checkpoints / str(step)) for step in self.steps()})

    def set_aside(self) -> list[str]:
        """Names of the checkpoints that could not be used."""
        return [name for name in files.subfolders(self.checkpoints) if name.endswith((".damaged", ".unfinished"))]

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, texts: Mapping[str, str | bytes]) -> None:
        """Each file (name -> text) whole or not at all; makes the folder where it is gone. OSError."""
        with as_os_errors():
            files.make(self.path)
            for name, text in texts.items():
                if "/" in name:
                    files.make((self.path / name).parent)
                files.write_atomic(self.path / name, text)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these files, and of the folder of checkpoints, someone has deleted or moved away. OSError."""
        with as_os_errors():
            # An object store knows no empty folders.
            gone = not is_remote(self.path) and not files.exists(self.checkpoints, kind="directory")
            return [CHECKPOINTS] * gone + [name for name in names if not files.exists(self.path / name, kind="file")]


def with_current_names(row: Mapping[str, Any]) -> Row:
    """Return a row under the names of today. Rows with `loss/ce` are older: their `loss` is what was minimized."""
    new = {"loss": "objective", "loss/ce": "loss"} if "loss/ce" in row else {}
    return {new.get(name, name): value for name, value in row.items()}


@functools.cache
def _say_gone(section: str) -> None:
    print(f"note: the run has settings of a kit that is not here ({section}); they are ignored", file=sys.stderr)


def _configured(info: dict[str, Any]) -> dict[str, Any]:
    """The configuration in run.json, without the sections of kits that are not here.

    A model that was imported before the key existed has no begin token of ours.
    """
    config: dict[str, Any] = info["config"]
    if isinstance(folders := config.get("kit"), str):
        kits.use(folders, recorded=True)
    for name in {name for name, keys in config.items() if isinstance(keys, dict)} - {*section_classes()}:
        _say_gone(name)
        config = {other: value for other, value in config.items() if other != name}
    return config | {"data": {"begin_with_end": False} | config["data"]} if "imported" in info else config


def _usable(values: dict[str, Any]) -> dict[str, Any]:
    """The same; KeyError or TypeError where what everyone asks for is missing."""
    int(values["data.batch_size"]), int(values["train.grad_accum"])
    return values


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """`data.batch_size` -> 8; KeyError or AttributeError for what is no configuration."""
    values = {
        f"{section}.{k}": v for section in ("model", "data", "optim", "train", "mesh") for k, v in config[section].items()
    }
    values["model_kind"] = config.get("model_kind", ModelConfig.architecture)  # older runs have one kind, and do not say it
    values["kit"] = config.get("kit")
    # Sections that older runs do not have, and those of kits.
    later = [name for name, keys in config.items() if isinstance(keys, dict) and name != "telemetry"]
    return values | {f"{section}.{k}": v for section in later for k, v in config[section].items()}


def make_run_folder(named: str | None, model_size: str) -> RunFolder:
    """Writable. One that the user did not name is new: two runs never meet by accident. ConfigError."""
    stamp = f"runs/{model_size}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [named] if named else [stamp, *(f"{stamp}-{n}" for n in range(2, 100))]
    for path in map(to_path, candidates):
        try:
            with as_os_errors():
                if not is_remote(path):
                    path.mkdir(parents=True, exist_ok=bool(named))
                (path / ".writable").write_text("")
                (path / ".writable").unlink()
            return RunFolder(path)
        except OSError as error:
            if isinstance(error, FileExistsError) and not named:
                continue  # another run has begun in the same second
            raise ConfigError(f"--checkpoint-dir {path}: cannot be written ({reason(error)}); choose another folder") from error
    raise ConfigError(f"--checkpoint-dir {stamp}: a hundred runs have begun in this second; name a folder")
