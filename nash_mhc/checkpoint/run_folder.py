"""The run directory. Reading it needs no JAX.

run.json          configuration, data, devices, versions, history     metrics.jsonl   one row per log interval
parameters.txt    name, shape and size of every parameter             eval.jsonl      one row per evaluation
result.json       result of a fine-tuning run: checkpoint, test score, questions before and after
checkpoints/      one numbered folder per checkpoint (store.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nash_mhc.checkpoint.manifest import FILE, best_of, held_out_loss, read_values, saved_steps, step_of
from nash_mhc.config.recorded import inherited, leaves
from nash_mhc.config.schema import KIT_SECTIONS, ConfigError, ModelConfig, RunConfig
from nash_mhc.storage import files
from nash_mhc.storage.errors import as_config_error, as_os_errors, reason
from nash_mhc.storage.files import MALFORMED, Folder, is_remote, parse_json, read_json, reading, to_path

RUN, PARAMETERS, METRICS, EVALUATIONS, CHECKPOINTS = (
    "run.json", "parameters.txt", "metrics.jsonl", "eval.jsonl", "checkpoints",
)  # fmt: skip
RESULT = "result.json"
ROW_FILES = (METRICS, EVALUATIONS)
Row = dict[str, Any]  # numbers or lists of numbers (one per layer) by name


def row_of(line: bytes) -> Row | None:
    """Return the row in a line of one of ROW_FILES; None if the line is damaged."""
    with contextlib.suppress(ValueError):
        row = parse_json(line)
        if isinstance(row, dict) and type(step := row.get("step")) is int and step_of(str(step)) is not None:
            return row
    return None


class Description(NamedTuple):
    """The record of a run, as far as resuming needs it."""

    config: dict[str, Any]  # section.key -> value
    rows: str | None  # digest that identifies its training data
    history: list[dict[str, Any]]  # settings that were changed when it was resumed
    init_from: dict[str, Any] | None  # the model that its weights were initialized from
    wandb: dict[str, Any] | None = None  # project and run id
    drawn: dict[str, Any] | None = None  # parameters that were drawn from a seed
    commands: tuple[str, ...] = ()  # the command line of each start


def _object(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the object under `name`, or None; raise TypeError for other types, or if its `folder` is not a string."""
    value = values.get(name)
    if value is not None and not (isinstance(value, dict) and isinstance(value.get("folder", ""), str)):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value


class RunFolder:
    """A local or remote run directory. Creating the object touches no file."""

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

    def info(self, *, hint: str = ", the --checkpoint-dir that it trained with") -> dict[str, Any]:
        """Return the content of run.json; raise ConfigError if this is not a run directory."""
        if not self.exists():
            raise ConfigError(f"{self.path}: no such folder; give a run directory{hint}")
        with as_config_error(self.path):
            found = files.exists(self.path / RUN)
        if not found:
            raise ConfigError(f"{self.path} has no {RUN}, so it is not a run directory (has the run started yet?)")
        return read_json(self.path / RUN, "restore it from a backup")

    def config(self, **hint: str) -> RunConfig:
        """Return the run's configuration; raise ConfigError if this version cannot read it."""
        info, path = self.info(**hint), self.path / RUN
        with reading(path, "it contains no run configuration"):
            try:
                return RunConfig.from_dict(_configured(info))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None

    def description(self) -> Description | None:
        """Return the record in run.json, or else in the latest readable checkpoint; None if there is no usable one."""
        try:
            info = parse_json((self.path / RUN).read_bytes())
            config, history = _usable(flatten_config(_configured(info))), list(info.get("history", []))
            commands = tuple(map(str, info.get("commands", ())))
            init_from, wandb, drawn = (_object(info, name) for name in ("init_from", "wandb", "drawn"))
            return Description(config, str(info["rows"]), history, init_from, wandb, drawn, commands)
        except (OSError, *MALFORMED):
            pass  # missing or damaged: every checkpoint has a copy
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
        """Return the settings that a resumed run inherits, by `section.key`; empty if they cannot be read."""
        with contextlib.suppress(OSError, *MALFORMED):
            info = parse_json((self.path / RUN).read_bytes())
            has_settings = "settings" in info  # as the user gave them; older runs have only the full configuration
            return inherited(leaves(info["settings" if has_settings else "config"]), as_asked=has_settings)
        described = self.description()
        return {} if described is None else inherited(described.config, as_asked=False)

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from, or a damaged one that a backup may replace."""
        return bool(self.finished()) or any(name.endswith(".damaged") for name in self.set_aside())

    def is_imported(self) -> bool:
        """Return whether this is an imported model instead of a run."""
        with contextlib.suppress(ConfigError):
            return "imported" in read_json(self.path / RUN)
        return False

    def result(self) -> dict[str, Any]:
        """Return the content of result.json; empty if it cannot be read."""
        with contextlib.suppress(ConfigError):
            return read_json(self.path / RESULT)
        return {}

    def rows(self, name: str = METRICS) -> list[Row]:
        """Return all rows of one of ROW_FILES; raise ConfigError for a damaged line, but the last may be incomplete."""
        path = self.path / name
        with as_config_error(path):
            lines = path.read_bytes().splitlines() if files.exists(path) else []
        rows: list[Row] = []
        for number, line in enumerate(lines, start=1):
            if (row := row_of(line)) is not None:
                rows.append(with_current_names(row))
            elif number < len(lines):
                raise ConfigError(f"{path}:{number}: not a JSON object with a step; repair or remove the line")
        return rows

    def last_row(self) -> Row:
        """Return the last complete row of metrics; empty if there is none."""
        with contextlib.suppress(OSError), as_os_errors():
            rows = map(row_of, reversed((self.path / METRICS).read_bytes().splitlines()))
            return next((row for row in rows if row is not None), {})
        return {}

    def completed_at(self, step: int) -> float | None:
        """Return when a checkpoint was completed, in seconds since the epoch; None if it is incomplete."""
        path = self.checkpoints / str(step) / FILE
        with contextlib.suppress(OSError), as_os_errors():
            return files.modified_at(path) if files.exists(path) else None
        return None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or not, oldest first."""
        return saved_steps(self.checkpoints)

    def finished(self) -> list[int]:
        """Return the steps whose save was not interrupted; their checkpoints may be damaged."""

        def is_finished(step: int) -> bool:
            has_manifest = files.exists(self.checkpoints / str(step) / FILE)
            return has_manifest or not files.exists(self.checkpoints / f"{step}.saving")

        return [step for step in self.steps() if is_finished(step)]

    def best_step(self) -> int | None:
        """Return the step with the lowest held-out loss; None without evaluated checkpoints."""
        return best_of({step: held_out_loss(self.checkpoints / str(step)) for step in self.steps()})

    def set_aside(self) -> list[str]:
        """Return the names of checkpoints that were renamed because they were unusable."""
        return [name for name in files.subfolders(self.checkpoints) if name.endswith((".damaged", ".unfinished"))]

    def write(self, texts: Mapping[str, str | bytes]) -> None:
        """Write each file (name -> content) atomically, creating missing folders. May raise OSError."""
        with as_os_errors():
            files.make(self.path)
            for name, text in texts.items():
                if "/" in name:
                    files.make((self.path / name).parent)
                files.write_atomic(self.path / name, text)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return which of these files, and `checkpoints/`, no longer exist. May raise OSError."""
        with as_os_errors():
            # Object stores have no empty folders.
            gone = not is_remote(self.path) and not files.exists(self.checkpoints, kind="directory")
            return [CHECKPOINTS] * gone + [name for name in names if not files.exists(self.path / name, kind="file")]


def with_current_names(row: Mapping[str, Any]) -> Row:
    """Return a row with current metric names. In old rows, which have `loss/ce`, `loss` is the objective."""
    new = {"loss": "objective", "loss/ce": "loss"} if "loss/ce" in row else {}
    return {new.get(name, name): value for name, value in row.items()}


def _configured(info: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration in run.json.

    Models imported before `begin_with_end` existed were trained without a begin token.
    """
    config: dict[str, Any] = info["config"]
    return config | {"data": {"begin_with_end": False} | config["data"]} if "imported" in info else config


def _usable(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`; raise KeyError, TypeError or ValueError if keys that all callers need are missing."""
    int(values["data.batch_size"]), int(values["train.grad_accum"])
    return values


def flatten_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration by `section.key`; raise KeyError or AttributeError if it is not one.

    The sections of kits that it leaves out have their defaults.
    """
    config = {name: dataclasses.asdict(kind()) for name, kind in KIT_SECTIONS.items()} | config  # type: ignore[call-overload]
    values = {
        f"{section}.{k}": v for section in ("model", "data", "optim", "train", "mesh") for k, v in config[section].items()
    }
    values["model_kind"] = config.get("model_kind", ModelConfig.architecture)  # missing in older runs
    values["kit"] = config.get("kit")
    # Sections that older runs lack, and those of kits.
    later = [name for name, keys in config.items() if isinstance(keys, dict) and name != "telemetry"]
    return values | {f"{section}.{k}": v for section in later for k, v in config[section].items()}


def make_run_folder(named: str | None, model_size: str) -> RunFolder:
    """Create a writable run directory, a new one under runs/ unless the user named it. May raise ConfigError."""
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
                continue  # another run started in the same second
            raise ConfigError(f"--checkpoint-dir {path}: cannot be written ({reason(error)}); choose another folder") from error
    raise ConfigError(f"--checkpoint-dir {stamp}: 100 runs started in this second; set --checkpoint-dir to another folder")
