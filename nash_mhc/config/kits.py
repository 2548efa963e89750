"""Kits: optional capabilities, each a folder in nash_mhc/kits or a folder named by --kit.

A kit's `__init__.py` holds `KIT`, a cheap record of the names that the kit provides. Their modules are imported when a
name is looked up. The core imports no kit.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nash_mhc.config.fields import ConfigError

OUTSIDE = "NASH_MHC_KITS"  # environment variable: kit folders outside of the package, which child processes inherit
_PACKAGE = "nash_mhc.kits"

T = TypeVar("T")


References = Mapping[str, str]  # name -> "module:attribute", relative to the kit


@dataclass(frozen=True, kw_only=True)
class Kit:
    """Names that a kit provides for each seam of the core; the registry of a seam has the field's name."""

    model_kinds: References = field(default_factory=dict)  # ArchitectureConfig classes (config/model.py)
    architectures: References = field(default_factory=dict)  # by model kind: Architecture (model/protocol.py)
    presets: References = field(default_factory=dict)  # by model kind: size -> RunConfig (config/presets.py)
    sections: References = field(default_factory=dict)  # Section classes (config/schema.py)
    objectives: References = field(default_factory=dict)  # ObjectiveKind (objectives/registry.py)
    optimizers: References = field(default_factory=dict)  # Make (optim/optimizers.py)
    sources: References = field(default_factory=dict)  # DataSource (data/sources.py)
    tokenizers: References = field(default_factory=dict)  # functions of a name (data/tokenizer.py)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # logical axes (RULES of parallel/sharding.py)
    figures: Mapping[str, Figure] = field(default_factory=dict)  # by name in metrics.jsonl
    nicknames: Mapping[str, str] = field(default_factory=dict)  # what others call a key -> its name, for "did you mean"
    generators: References = field(default_factory=dict)  # by flag of `generate`, without dashes: Generator
    weights: References = field(default_factory=dict)  # by section: (model, section) -> model (model/architectures.py)
    formats: References = field(default_factory=dict)  # by a file of the folder: ModelFormat (loading/formats.py)
    hub_commands: Mapping[str, HubCommand] = field(default_factory=dict)  # by name: `python -m nash_mhc.hub NAME`
    commands: Mapping[str, Command] = field(default_factory=dict)  # `nash-mhc NAME`


class Figure(NamedTuple):
    """How to show a metric of an objective: `NAME` in metrics.jsonl, `eval/NAME` in eval.jsonl."""

    fact: str  # its name in the report's table of facts
    form: str = "{:.4f}"
    chart: str = ""  # title of its chart in the report; empty: no chart
    log: bool = False  # whether the chart is logarithmic
    line: str = ""  # suffix of the evaluation's line on the terminal, with names of eval.jsonl in braces
    short: str = ""  # name and form of the value in a step's line and in the panel, such as "kl {:.4f}"
    of_text: bool = True  # whether bits per byte and perplexity are meaningful too


class Command(NamedTuple):
    """A command of `nash-mhc`."""

    about: str
    main: str  # "module:function", absolute: () -> exit code


class Generator(NamedTuple):
    """A flag of `generate` that replaces writing text."""

    metavar: str
    help: str
    answer: str  # "module:function", absolute: (loading.load.Loaded, the flag's value) -> text to print


class HubCommand(NamedTuple):
    """A subcommand of `python -m nash_mhc.hub`."""

    about: str  # one line of help
    main: str  # "module:function", absolute: (arguments after the name) -> exit code


def all_kits() -> dict[str, Kit]:
    """Return all kits by name, those of the package first."""
    return _all_kits(os.environ.get(OUTSIDE, ""))


@functools.cache
def _all_kits(outside: str) -> dict[str, Kit]:
    try:
        package = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:  # the folder was deleted: the core runs without kits
        if error.name != _PACKAGE:
            raise
        return {}
    inside = [found.name for found in pkgutil.iter_modules(package.__path__[:1]) if found.ispkg]
    names = [*inside, *(Path(folder).name for folder in outside.split(os.pathsep) if folder)]
    return {name: importlib.import_module(f"{_PACKAGE}.{name}").KIT for name in names}


def use(folders: str | None, *, recorded: bool = False) -> None:
    """Add kit folders outside of the package, separated by commas. Raise ConfigError for one that is not a kit.

    recorded: the folders come from a run's metadata; a kit of the same name loaded from elsewhere is accepted.
    """
    for folder in absolute(folders or "").split(","):
        if folder:
            _use(folder, recorded)


def clear_cache() -> None:
    """Clear the cache of kits, after a folder was added or removed."""
    _all_kits.cache_clear()


def absolute(folders: str) -> str:
    """Return the folders as absolute paths, separated by commas."""
    return ",".join(os.path.abspath(os.path.expanduser(name.strip())) for name in folders.split(",") if name.strip())


def _use(folder: str, recorded: bool) -> None:
    name, known = Path(folder).name, [path for path in os.environ.get(OUTSIDE, "").split(os.pathsep) if path]
    if folder in known or (recorded and name in all_kits()):
        return
    if name in all_kits() and folder in importlib.import_module(f"{_PACKAGE}.{name}").__path__:
        return  # a kit of the package
    if not (Path(folder) / "__init__.py").is_file() or not name.isidentifier():
        moved = "if the kit of this run has moved, pass its new path with --kit"
        remedy = moved if recorded else "pass a folder whose __init__.py defines KIT"
        raise ConfigError(f"--kit {folder}: there is no kit in this folder; {remedy}")
    if name in all_kits():
        raise ConfigError(f"--kit {folder}: a kit named {name} exists already; rename the folder")
    package, before = importlib.import_module(_PACKAGE), os.environ.get(OUTSIDE)
    package.__path__.append(str(Path(folder).parent))
    os.environ[OUTSIDE] = os.pathsep.join([*known, folder])
    try:
        all_kits()
    except Exception as error:  # any failure of the user's code
        package.__path__.pop()
        os.environ.pop(OUTSIDE) if before is None else os.environ.update({OUTSIDE: before})
        raise ConfigError(f"--kit {folder}: cannot be loaded ({type(error).__name__}: {error})") from error


def provided(seam: str) -> list[str]:
    """Return the names that kits provide for a seam, without importing their modules."""
    return [name for kit in all_kits().values() for name in getattr(kit, seam)]


def run_command(name: str) -> int:
    """Run a kit's command and return its exit code."""
    if name not in COMMANDS:
        raise ConfigError(f"{name}: unknown command; commands of the loaded kits: {', '.join(COMMANDS) or 'none'}")
    return int(load(COMMANDS[name].main)())


def load(reference: str) -> Any:
    """Import and return an absolute "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def deferred(reference: str) -> Callable[..., Any]:
    """Return a function that imports an absolute "module:function" when it is called, and calls it."""

    def call(*args: Any) -> Any:
        return load(reference)(*args)

    return call


def nicknames() -> dict[str, str]:
    """Return names that other frameworks use for the keys of kits."""
    return {name: key for kit in all_kits().values() for name, key in kit.nicknames.items()}


class Registry(MutableMapping[str, T], Generic[T]):
    """Entries by name: the core's, registered ones, and those of kits, which are loaded when looked up.

    `seam` is the field of Kit that lists the kits' entries.
    """

    def __init__(self, seam: str, known: Mapping[str, T | str]) -> None:
        """`known` may have absolute references, "module:attribute"."""
        self._seam, self._known = seam, dict(known)

    def _offered(self) -> dict[str, Any]:
        """Return the kits' entries by name: absolute references, or entries given directly."""
        offers = {kit: getattr(record, self._seam) for kit, record in all_kits().items()}
        absolute = lambda kit, entry: f"{_PACKAGE}.{kit}.{entry}" if isinstance(entry, str) else entry
        return {name: absolute(kit, entry) for kit, offered in offers.items() for name, entry in offered.items()}

    def __getitem__(self, name: str) -> T:
        entry = self._known[name] if name in self._known else self._offered()[name]
        return load(entry) if isinstance(entry, str) else entry

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._offered()

    def __setitem__(self, name: str, entry: T) -> None:
        self._known[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._known, *self._offered()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> Registry[T]:
        """Return a separate registry with the same entries."""
        return Registry(self._seam, self._known)


# Metrics of objectives other than the loss.
FIGURES: Registry[Figure] = Registry("figures", {})
# Commands of kits.
COMMANDS: Registry[Command] = Registry("commands", {})
