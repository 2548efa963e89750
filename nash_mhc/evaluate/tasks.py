"""The names of --tasks: built-in evaluations, and tasks of lm-evaluation-harness by name or file."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.fields import ConfigError, check_scheme
from nash_mhc.runtime.compat.lm_eval import quietly
from nash_mhc.storage.errors import reason

STORIES, HELD_OUT, BYTES = "stories", "held_out", "bytes:"
log = logging.getLogger(__name__)
_RESAMPLES = 1000  # bootstrap samples for standard errors; lm-eval's default of 100,000 takes minutes
_NAMED = re.compile(r"^(?:task|group|tag): *[\"']?([\w.+-]+)[\"']? *$", re.MULTILINE)


def read_text(name: str) -> str:
    """Read the file of `bytes:FILE`."""
    check_scheme(BYTES, name.removeprefix(BYTES))
    path = Path(name.removeprefix(BYTES)).expanduser()
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({reason(error)})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text (byte {error.start:,})") from None
    if not text:
        raise ConfigError(f"{name}: the file is empty")
    return text


class Task(NamedTuple):
    """The lm-eval tasks behind one name of --tasks."""

    name: str  # as given
    manager: Any  # the lm-eval TaskManager that loaded them
    parts: list[Any]  # lm-eval tasks and groups


class Results(NamedTuple):
    """The results of one name of --tasks."""

    figures: dict[str, dict[str, Any]]  # task -> `metric,filter` -> value
    details: dict[str, Any]  # versions, shots and sample counts, for --json
    samples: dict[str, list[dict[str, Any]]]  # task -> documents and answers, if requested


def check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks of lm-evaluation-harness need the lm-eval package; pip install 'nash_mhc[eval]'")


def is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or os.sep in name or Path(name).is_dir()


def check_path(name: str) -> None:
    """Check a file or folder of tasks without importing lm-eval."""
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"--tasks {name}: no such file or folder")
    if path.is_dir() and not sorted(path.glob("**/*.yaml")):
        raise ConfigError(f"--tasks {name}: the folder has no .yaml file of a task")


def load_tasks(names: list[str]) -> list[Task]:
    """Load tasks by name, file or folder; raise ConfigError for an unknown name or a broken file."""
    with quietly():
        return [_load(name) for name in names]


def _load(name: str) -> Task:
    from lm_eval.tasks import TaskManager

    path = Path(name).expanduser()
    log.info(f"loading {name} ...")
    if not is_path(name):
        manager, selected = _by_name(name)
    elif path.is_dir():
        for file in sorted(path.glob("**/*.yaml")):
            _read_yaml(file)  # lm-eval skips files that it cannot read
        manager = TaskManager(include_path=str(path), include_defaults=False)
        selected = _outermost(manager)
        if not selected:
            raise ConfigError(f"--tasks {name}: none of its .yaml files has a `task:` with a name")
    else:
        values = _read_yaml(path)
        if not {"task", "group", "class"} & set(values):
            raise ConfigError(f"--tasks {name}: not an lm-eval task; it has no `task:` with a name")
        # A group's tasks are in its folder, and lm-eval loads a group by name only.
        include, selected = ([str(path.parent)], [str(values["group"])]) if "group" in values else ([], [str(path)])
        manager = TaskManager(include_path=include, include_defaults=False)
    try:
        loaded = manager.load(selected)
    except Exception as error:  # from the task's code, template or data
        raise ConfigError(f"--tasks {name}: cannot be loaded ({_in_one_line(error)})") from error
    groups, children = loaded.get("groups", {}), loaded.get("group_map", {})
    inner = {child for names in children.values() for child in names}
    in_groups = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    parts = [group for key, group in groups.items() if key not in inner]
    parts += [task for key, task in loaded["tasks"].items() if key not in in_groups]
    return Task(name, manager, parts)


class _TaskLoader(yaml.SafeLoader):
    """YAML of lm-eval tasks; `!function` values stay names, so no code is loaded."""


_TaskLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def _read_yaml(path: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the keys of a task's file, with those of the files that it includes."""
    path = path.expanduser().resolve()
    try:
        if path in within:
            raise ValueError("it includes itself")
        values = yaml.load(path.read_bytes(), _TaskLoader)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable lm-eval task ({_in_one_line(error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a readable lm-eval task (the file has no keys)")
    includes = values.pop("include", [])
    merged: dict[str, Any] = {}
    for name in includes if isinstance(includes, list) else [includes]:
        included = _read_yaml(path.parent / str(name), (*within, path))
        merged |= {key: value for key, value in included.items() if key != "task_list"}
    return merged | values


def _outermost(manager: Any) -> list[str]:
    """Return the groups and tasks that are in no other group, so that each task runs once."""
    inner: set[str] = set()
    for group in manager.all_groups:
        for child in (manager.task_index[group].cfg or {}).get("task", []):
            inner.add(child if isinstance(child, str) else child.get("task", child.get("group", "")))
    return [name for name in [*manager.all_groups, *manager.all_subtasks] if name not in inner]


def _by_name(name: str) -> tuple[Any, list[str]]:
    """Return a task manager and the names to load from it.

    lm-eval parses 14,000 files to list its tasks; a text search finds the file of most tasks at once.
    """
    from lm_eval.tasks import TaskManager

    texts = _task_files()
    pattern = re.compile(rf"^task: *[\"']?{re.escape(name)}[\"']? *$", re.MULTILINE)
    matching = [file for file, text in texts.items() if pattern.search(text)]
    if len(matching) == 1:
        return TaskManager(include_path=[], include_defaults=False), [str(matching[0])]
    if not any(name in text for text in texts.values()):
        known = {match for text in texts.values() for match in _NAMED.findall(text)}
        hint = did_you_mean(name, [STORIES, HELD_OUT, *sorted(known)]) or "; `lm-eval ls tasks` lists the names"
        raise ConfigError(f"--tasks {name}: lm-eval has no task of this name, and no such file exists{hint}")
    log.info("reading lm-eval's list of tasks ...")
    manager = _all_tasks()
    if name not in manager.all_tasks:
        raise ConfigError(f"--tasks {name}: lm-eval has no task of this name{did_you_mean(name, manager.all_tasks)}")
    return manager, [name]


@functools.cache
def _task_files() -> dict[Path, str]:
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    return {file: file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("**/*.yaml"))}


@functools.cache
def _all_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def run_task(
    task: Task, model: Any, *, limit: int | None = None, num_fewshot: int | None = None, with_samples: bool = False
) -> Results:
    """Run a task with a HarnessModel; raise ConfigError for errors of the task, such as a template that fails."""
    from lm_eval import simple_evaluate

    model.task, model.is_running = Path(task.name).stem if is_path(task.name) else task.name, False
    try:
        with quietly():
            results: Any = simple_evaluate(
                model=model, tasks=list(task.parts), limit=limit, num_fewshot=num_fewshot, log_samples=with_samples,
                bootstrap_iters=_RESAMPLES, task_manager=task.manager,
            )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"--tasks {task.name}: {error}") from None
    except Exception as error:
        if model.is_running:  # not the task's fault
            raise
        raise ConfigError(f"--tasks {task.name}: lm-eval could not run it ({_in_one_line(error)})") from error
    details = {name: results.get(name) for name in ("versions", "n-shot", "n-samples", "higher_is_better")}
    return Results({**results["results"], **(results.get("groups") or {})}, details, results.get("samples") or {})


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
