"""argv + YAML + key=value -> RunConfig, with the origin of every value. No jax.

Flags, override names, YAML keys and the help text are all derived from the fields in schema.py. Settings apply
in the order of argv and the last one wins; the preset named by the last `model_size` lies below all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nash_mhc.config import presets
from nash_mhc.config.commands import OneLineParser, did_you_mean
from nash_mhc.config.help import as_flags, render, section_help, usage
from nash_mhc.config.key_names import OURS, SMALL, Key, find, keys, of_another_kind, sections
from nash_mhc.config.schema import ARCHITECTURES, ConfigError, RunConfig, at_home, check_field, weighted_parts

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
__all__ = ["Key", "Parsed", "as_flags", "keys", "parse", "render", "sections", "shown", "usage"]

OwnFlags = Callable[[argparse._ArgumentGroup], object]
Settings = dict[str, tuple[Any, str]]  # path -> value, origin
Found = Callable[[Mapping[str, Any], Mapping[str, Any]], Settings]


@dataclass(frozen=True)
class Parsed:
    config: RunConfig
    origins: dict[str, str]  # "data.batch_size" -> "flag --batch-size", "run.yaml:7", "preset tiny", ...
    print_config: bool
    given: dict[str, Any] = field(default_factory=dict)  # what the user has set, by flag, file or key=value
    own: argparse.Namespace = field(default_factory=argparse.Namespace)  # the command's own flags


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _convert(key: Key, text: str, name: str, *, quoted: bool = False) -> Any:
    """Text to the key's type, then the schema's own check; `name` is what the user called the key."""
    word = text.strip().lower()
    if not word:
        raise ConfigError(f"{name} needs a value")
    value: Any = at_home(text) if key.metadata["path"] else text
    # Quotes in YAML keep the literal text, and "none" is an ordinary word where the key cannot be None (--remat none).
    choices = key.metadata["choices"] or ()
    is_none = not quoted and not choices and (word in ("null", "~") or (word == "none" and type(None) in key.kinds))
    with contextlib.suppress(KeyError, ValueError):  # what stays text fails the check below, which says what it wants
        if is_none:
            value = None
        elif bool in key.kinds:
            value = BOOLS[word]
        elif float in key.kinds:
            value = float(word)
        elif int in key.kinds:
            # People write 1e4 for a number of steps; plain digits must not lose precision on the way through a float.
            value = int(word) if re.fullmatch(r"[+-]?[\d_]+", word) else float(word)
            value = int(value) if isinstance(value, int) or value.is_integer() else text
    try:
        check_field(name, value, key.annotation, key.metadata)
    except ConfigError as error:
        raise ConfigError(f"{error}{did_you_mean(text, choices)}") from None
    return value


def _yaml_nodes(file: str) -> yaml.nodes.Node | None:
    try:
        return yaml.compose(Path(file).expanduser().read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--config cannot read {file}: {reason}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "nested too deeply"
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {what}") from None


def _read_yaml(file: str, settings: Settings, kind: str) -> None:
    """Applies one YAML file. The node tree, not plain values: it keeps line numbers and the text of each scalar."""
    known = keys(kind)
    lines: dict[str, int] = {}

    def walk(node: yaml.nodes.Node | None, section: str) -> None:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
            return  # an empty file, or a section whose keys are all commented out
        if not isinstance(node, yaml.MappingNode):
            start = f"{file}:{node.start_mark.line + 1}"
            raise ConfigError(f"{start}: {section or 'the file'} must hold lines of the form 'key: value'")
        for name_node, child in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "[...]"
            path = f"{section}.{name}" if section else name
            line = name_node.start_mark.line + 1
            with _at(f"{file}:{line}"):
                if path in lines:
                    raise ConfigError(f"{path} is set twice, first on line {lines[path]}; keep one of them")
                lines[path] = line
                # A dotted name is a path for key=value only; in a file the sections are nested.
                if (path not in known or "." in name) and (section or name not in sections()):
                    raise ConfigError(_misplaced(name, section, kind))
                if path in known:
                    if not isinstance(child, yaml.ScalarNode):
                        raise ConfigError(f"{path} takes a single value, not a list or a section")
                    value = _convert(known[path], child.value, path, quoted=child.style is not None)
                    settings[path] = (value, f"{file}:{line}")
            if path not in known:
                walk(child, name)

    walk(_yaml_nodes(file), "")


def _misplaced(name: str, section: str, kind: str) -> str:
    """About a name in a file that is no key there: where it belongs, else the nearest key, else all there are."""
    if section == "model" and (whose := of_another_kind(f"model.{name}", kind)):
        return f"unknown key model.{name}{whose}"
    key, known = find(name, loose=True, kind=kind), keys(kind)
    if key is not None:
        top, _, last = key.path.rpartition(".")
        if top and top == section:
            return f"unknown key {section}.{name}; did you mean {last}?"
        return f"{last} belongs under {top}:" if top else f"{last} belongs at the top of the file, not under {section}:"
    here = [p.removeprefix(section + ".") for p in known if p.startswith(section + ".")]
    here = here or [*sections(), *(p for p in known if "." not in p)]
    hint = did_you_mean(name, here) or next(
        (f"; did you mean {p}?" for p in known if did_you_mean(name, [p.split(".")[-1]])), ""
    )
    return f"unknown key {section + '.' if section else ''}{name}{hint or '; there are ' + ', '.join(here)}"


def _is_folder(word: str) -> bool:
    """Whether a word alone is meant as a folder: a typo of a preset or a flag is not to begin a run of its name."""
    return "/" in word or "\\" in word or os.path.isdir(word)


def _run_folder(name: str) -> str:
    """ConfigError for a folder of other things: a run's files would lie among them."""
    there = set(os.listdir(name)) if os.path.isdir(name) else set()
    if there and not there & {"run.json", "checkpoints", ".lock"}:
        raise ConfigError(f"{name}: is there and holds no run; give a new folder, or --dataset {name} for what to train on")
    return name


def _kind(argv: Sequence[str]) -> str:
    """The last kind of model that is named: it says which keys there are. What is wrong is found when they are read."""
    found = OURS
    for word, follows in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        flag, equals, text = word.replace("--model_kind", "--model-kind").partition("=")
        text = text if equals else follows
        if flag == "--config":
            with contextlib.suppress(ConfigError):
                root = _yaml_nodes(text)
                top = root.value if isinstance(root, yaml.MappingNode) else []
                found = next((str(child.value) for name, child in top if name.value == "model_kind"), found)
        elif flag == "--model-kind" or (flag == "model_kind" and equals):
            found = text
    return found if found in ARCHITECTURES else OURS


def _scan(argv: Sequence[str], own_flags: Sequence[str], folder: str | None = None, kind: str = OURS) -> tuple[Settings, bool]:
    """Applies argv from left to right; returns the settings and whether --print-config was there.

    `folder` is the path of the key that a folder without a flag is for.
    """
    known = keys(kind)
    by_flag = {k.flag: k for k in known.values()}
    off = {"--no-" + k.flag[2:]: k for k in known.values() if bool in k.kinds}
    settings: Settings = {}
    print_config = False
    alone: str | None = None  # the folder without a flag
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        flag, equals, text = token.partition("=")
        if (dashed := flag.replace("_", "-")) in by_flag or dashed in off:
            flag = dashed  # --learning_rate
        key = by_flag.get(flag)
        if not token.startswith("-"):
            if folder is not None and "=" not in token and _is_folder(token):
                if alone is not None:
                    raise ConfigError(f"two folders are given, {alone} and {token}; name one")
                alone = _run_folder(token)
                continue
            if not equals or not flag:
                hint = f"; the folder of a run has a slash in its name: runs/{token}" if folder is not None else ""
                raise ConfigError(f"unexpected argument {token!r}; write --flag value or section.key=value{hint}")
            with _at(f"override {token}"):
                if (key := find(flag, kind=kind)) is None:
                    guess, valid = find(flag, loose=True, kind=kind), [*known, *(k.short for k in known.values())]
                    hint = f"; did you mean {guess.path}?" if guess else did_you_mean(flag, valid)
                    hint = of_another_kind(flag, kind) or hint
                    raise ConfigError(f"unknown key {flag}{hint or '; --help lists them all'}")
                settings[key.path] = (_convert(key, text, key.path), f"override {token}")
        elif flag in off or flag in ("--print-config", SMALL):
            if equals:
                raise ConfigError(f"{flag} takes no value; leave out '={text}'")
            if flag in off:
                settings[off[flag].path] = (False, f"flag {flag}")
            elif flag == SMALL:
                settings["model_size"] = ("small", f"flag {flag}")
            else:
                print_config = True
        elif key is None and flag != "--config":
            short = flag.lstrip("-").replace("-", "_")
            guess = find(short, loose=True, kind=kind)
            valid = [*by_flag, *off, "--config", "--print-config", "--help", SMALL, *own_flags]
            hint = f"; did you mean {guess.flag}?" if guess else did_you_mean(flag, valid)
            hint = of_another_kind(short, kind) or hint
            raise ConfigError(f"unknown flag {flag}{hint or '; --help lists them all'}")
        else:
            is_bool = key is not None and bool in key.kinds
            if not equals:
                follows = rest[0] if rest else "--"
                # -1 is a value, -x and --seed are not: a forgotten value must not swallow the next flag.
                takes = follows.lower() in BOOLS if is_bool else re.match(r"(?!-)|-[\d.]|-inf$", follows)
                text = rest.pop(0) if takes else "true" if is_bool else ""
            if key is not None:
                value = _convert(key, text, flag)
                before, origin = settings.get(key.path, ("", ""))
                if key.metadata["weighted"] and origin == f"flag {flag}" and before != value:
                    # As everywhere, the last one would win: but who names two datasets wants both.
                    if bare := [part for part in (before, value) if not weighted_parts(part)]:
                        raise ConfigError(f"{flag} was given twice; a mixture's have weights: {flag} {bare[0]}:0.5")
                    value = f"{before},{value}"
                settings[key.path] = (value, f"flag {flag}")
            elif text:
                _read_yaml(text, settings, kind)
            else:
                raise ConfigError("--config needs a value, the name of a YAML file")
    if folder is not None and alone is not None:  # as plain as a flag: what a file says about it does not count
        before, origin = settings.get(folder, (None, ""))
        if origin.startswith(("flag", "override")):
            raise ConfigError(f"two folders are given, {before} and {alone}; name one")
        settings[folder] = (_convert(known[folder], alone, folder), f"argument {alone}")
    return settings, print_config


def _one_length(settings: Settings) -> None:
    """Epochs and steps both say how long a run is: one that was typed goes before one in a file."""
    epochs, steps = (settings.get(f"train.{name}") for name in ("epochs", "total_steps"))
    if epochs is None or steps is None or epochs[0] is None:
        return
    typed = [origin.startswith(("flag ", "override ")) for _, origin in (epochs, steps)]
    if all(typed):
        raise ConfigError(f"--epochs {epochs[0]:g} and --total-steps {steps[0]} both say how long the run is; leave one out")
    if typed[1]:
        settings["train.epochs"] = (None, steps[1])


def _build(settings: Settings, found: Found, kind: str) -> tuple[RunConfig, dict[str, str]]:
    """The preset, what is found in the user's folders on top of it, and the settings above all."""
    size, size_origin = settings.get("model_size", (RunConfig.model_size, "default"))
    known = keys(kind)
    values = presets.run(size, kind).to_dict()
    origins = dict.fromkeys(known, f"preset {size}") | {"model_size": size_origin, "model_kind": "default"}
    preset = {path: key.of(values) for path, key in known.items()}
    given = {path: value for path, (value, _) in settings.items()}
    settings = {path: setting for path, setting in found(given, preset | given).items() if path not in settings} | settings
    # A short trial run of a preset should just work: its warm-up is at most a tenth, unless the user chose one.
    total = settings.get("train.total_steps", (math.inf, ""))[0]
    if values["optim"]["warmup_steps"] > total / 10:
        values["optim"]["warmup_steps"] = total // 10
        origins["optim.warmup_steps"] += ", fitted to total_steps"
    for path, (value, origin) in settings.items():
        section, _, name = path.rpartition(".")
        (values[section] if section else values)[name] = value
        origins[path] = origin
    try:
        return RunConfig.from_dict(values), origins
    except ConfigError as error:  # keys that do not fit together: say where each of them came from
        named = [path for path in known if re.search(rf"\b{re.escape(path)}\b", str(error))]
        where = ", ".join(f"{path} from {origins[path]}" for path in named)
        raise ConfigError(f"{error}{f' ({where})' if where else ''}") from None


def _nothing(given: Mapping[str, Any], values: Mapping[str, Any]) -> Settings:
    return {}


def parse(
    argv: Sequence[str],
    *,
    prog: str = "python -m nash_mhc.train",
    own: OwnFlags | None = None,
    found: Found = _nothing,
    folder: str | None = None,
) -> Parsed:
    """Raises ConfigError on any mistake; -h or --help prints and exits with 0.

    `own` adds a command's own flags (no positionals) to an argparse group; their values come back as `Parsed.own`.
    `found` is asked for settings that follow from others (what the user has set, all values):
    they hold unless the user has set them. `folder` is the path of the key that a folder without a flag is for.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    if own is not None:
        own(parser.add_argument_group("this command"))
    kind = _kind(argv)
    if asked := [at for at, word in enumerate(argv) if word in ("-h", "--help")]:
        section = argv[asked[0] + 1 : asked[0] + 2]
        if section and not section[0].startswith("-"):
            print(section_help(section[0], kind), end="")
        else:
            print(usage(prog, folder=folder is not None, kind=kind) + (f"\n{parser.format_help()}" if own else ""), end="")
        raise SystemExit(0)
    namespace, rest = parser.parse_known_args(parser.dashed(argv)) if own else (argparse.Namespace(), list(argv))
    settings, print_config = _scan(rest, [name for action in parser._actions for name in action.option_strings], folder, kind)
    _one_length(settings)
    given = {path: value for path, (value, _) in settings.items()}
    return Parsed(*_build(settings, found, kind), print_config, given, namespace)


def shown(parsed: Parsed) -> bool:
    """Prints the configuration where --print-config asks for it, and nothing else is to be done."""
    if parsed.print_config:
        print(render(parsed.config, parsed.origins), end="")
    return parsed.print_config
