"""Tasks of lm-evaluation-harness: found by name or file, loaded, and put to a model of ours, without its own noise."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.lm_eval import quietly

if TYPE_CHECKING:
    from nash_mhc.evaluate.harness_model import HarnessModel

_RESAMPLES = 1000  # for the errors of metrics that are no means; lm-eval's 100,000 take minutes
_NAMED = re.compile(r"^(?:task|group|tag): *[\"']?([\w.+-]+)[\"']? *$", re.MULTILINE)


class Task(NamedTuple):
    """What one name of --tasks stands for."""

    name: str  # as it was given
    manager: Any  # lm-eval's, which knows it
    parts: list[Any]  # lm-eval's tasks and groups


class Found(NamedTuple):
    """Of one name of --tasks."""

    figures: dict[str, dict[str, Any]]  # task -> `metric,filter` -> value
    details: dict[str, Any]  # what else lm-eval tells, for --json
    samples: dict[str, list[dict[str, Any]]]  # task -> every document with its answer, where they were asked for


def check_installed() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks of lm-evaluation-harness need its package; pip install 'nash_mhc[eval]'")


def is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or os.sep in name or Path(name).is_dir()


def check_path(name: str) -> None:
    """Before anything slow is imported. ConfigError."""
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"--tasks {name}: no such file or folder")
    if path.is_dir() and not sorted(path.glob("**/*.yaml")):
        raise ConfigError(f"--tasks {name}: the folder has no .yaml file of a task")


def load_tasks(names: list[str], say: Callable[[str], None] = lambda text: None) -> list[Task]:
    """ConfigError for a name that there is not and a file that is broken."""
    with quietly():
        return [_load(name, say) for name in names]


def _load(name: str, say: Callable[[str], None]) -> Task:
    from lm_eval.tasks import TaskManager

    path = Path(name).expanduser()
    say(f"loading {name} ...")
    if not is_path(name):
        manager, wanted = _by_name(name, say)
    elif path.is_dir():
        for file in sorted(path.glob("**/*.yaml")):
            _read_yaml(file)  # lm-eval passes over what it cannot read
        manager = TaskManager(include_path=str(path), include_defaults=False)
        wanted = _outermost(manager)
        if not wanted:
            raise ConfigError(f"--tasks {name}: none of its .yaml files has a `task:` with a name")
    else:
        values = _read_yaml(path)
        if not {"task", "group", "class"} & set(values):
            raise ConfigError(f"--tasks {name}: is no task of lm-eval; it has no `task:` with a name")
        # The tasks of a group are beside it; by its file, lm-eval does not know one.
        beside, wanted = ([str(path.parent)], [str(values["group"])]) if "group" in values else ([], [str(path)])
        manager = TaskManager(include_path=beside, include_defaults=False)
    try:
        loaded = manager.load(wanted)
    except Exception as error:  # whatever a task's own code, its template or its data raise
        raise ConfigError(f"--tasks {name}: cannot be loaded ({_in_a_line(error)})") from error
    groups, below = loaded.get("groups", {}), loaded.get("group_map", {})
    inner = {child for children in below.values() for child in children}
    of_groups = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    parts = [group for known, group in groups.items() if known not in inner]
    parts += [task for known, task in loaded["tasks"].items() if known not in of_groups]
    return Task(name, manager, parts)


class _TaskLoader(yaml.SafeLoader):
    """YAML as lm-eval writes it; the code that `!function` names stays a name."""


_TaskLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def _read_yaml(path: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the keys of a task's file, with those of the files that it includes."""
    path = path.expanduser().resolve()
    try:
        if path in within:
            raise ValueError("it includes itself")
        values = yaml.load(path.read_bytes(), _TaskLoader)
    except Exception as error:
        raise ConfigError(f"{path}: is no task that lm-eval can read ({_in_a_line(error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is no task that lm-eval can read (it holds no keys)")
    includes = values.pop("include", [])
    merged: dict[str, Any] = {}
    for name in includes if isinstance(includes, list) else [includes]:
        included = _read_yaml(path.parent / str(name), (*within, path))
        merged |= {key: value for key, value in included.items() if key != "task_list"}
    return merged | values


def _outermost(manager: Any) -> list[str]:
    """Groups and tasks that are in no other group: each task is asked once."""
    inner: set[str] = set()
    for group in manager.all_groups:
        for child in (manager.task_index[group].cfg or {}).get("task", []):
            inner.add(child if isinstance(child, str) else child.get("task", child.get("group", "")))
    return [name for name in [*manager.all_groups, *manager.all_subtasks] if name not in inner]


def _by_name(name: str, say: Callable[[str], None]) -> tuple[Any, list[str]]:
    """(a manager that knows it, what to ask it for). lm-eval reads 14,000 files to know all names; this finds the one
    file of most tasks at once."""
    from lm_eval.tasks import TaskManager

    texts = _files()
    at = [file for file, text in texts.items() if re.search(rf"^task: *[\"']?{re.escape(name)}[\"']? *$", text, re.MULTILINE)]
    if len(at) == 1:
        return TaskManager(include_path=[], include_defaults=False), [str(at[0])]
    if not any(name in text for text in texts.values()):
        known = {found for text in texts.values() for found in _NAMED.findall(text)}
        raise ConfigError(
            f"--tasks {name}: lm-eval has no task of this name, and here is no such file"
            f"{did_you_mean(name, ['stories', *sorted(known)]) or '; its names are what `lm-eval ls tasks` lists'}"
        )
    say("reading lm-eval's list of tasks ...")
    manager = _all_tasks()
    if name not in manager.all_tasks:
        raise ConfigError(f"--tasks {name}: lm-eval has no task of this name{did_you_mean(name, manager.all_tasks)}")
    return manager, [name]


@functools.cache
def _files() -> dict[Path, str]:
    """Every task file of lm-eval, as text."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    return {file: file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("**/*.yaml"))}


@functools.cache
def _all_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


def run_task(
    task: Task, model: HarnessModel, *, limit: int | None = None, num_fewshot: int | None = None, with_samples: bool = False
) -> Found:
    """ConfigError for a task that cannot be put to a model: a template that fails, a metric that is not there."""
    from lm_eval import simple_evaluate

    model.task, model.is_at_work = Path(task.name).stem if is_path(task.name) else task.name, False
    try:
        with quietly():
            found: Any = simple_evaluate(
                model=model, tasks=list(task.parts), limit=limit, num_fewshot=num_fewshot, log_samples=with_samples,
                bootstrap_iters=_RESAMPLES, task_manager=task.manager,
            )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"--tasks {task.name}: {error}") from None
    except Exception as error:
        if model.is_at_work:
            raise
        raise ConfigError(f"--tasks {task.name}: lm-eval could not run it ({_in_a_line(error)})") from error
    details = {name: found.get(name) for name in ("versions", "n-shot", "n-samples", "higher_is_better")}
    return Found({**found["results"], **(found.get("groups") or {})}, details, found.get("samples") or {})


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
