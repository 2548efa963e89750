"""Parse flags, YAML files and key=value into a RunConfig, with the origin of every value. No jax.

Settings apply in the order of argv; the last one wins. They override, in this order: the settings recorded in the run
directory, settings inferred from other folders, and the preset of the last `model_size`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from nash_mhc.config import kits, presets
from nash_mhc.config.commands import OneLineParser, did_you_mean
from nash_mhc.config.fields import Settings
from nash_mhc.config.help import as_flags, render, section_help, usage
from nash_mhc.config.keys import BOOLS, OURS, SMALL, Key, at, convert, find, keys, other_kind_hint, sections
from nash_mhc.config.schema import ARCHITECTURES, ConfigError, RunConfig, weighted_parts
from nash_mhc.config.yaml_file import nodes_of, read_yaml

__all__ = ["Key", "Parsed", "Settings", "as_flags", "keys", "parse", "render", "sections", "shown", "usage"]

log = logging.getLogger(__name__)
_TYPED = ("flag ", "override ")  # origins of settings typed on the command line
OwnFlags = Callable[[argparse._ArgumentGroup], object]
Found = Callable[[Mapping[str, Any], Mapping[str, Any]], Settings]
Recorded = Callable[[str, Mapping[str, Any]], Settings]


@dataclass(frozen=True)
class Parsed:
    config: RunConfig
    origins: dict[str, str]  # "data.batch_size" -> "flag --batch-size", "run.yaml:7", "preset tiny", ...
    print_config: bool
    given: dict[str, Any] = field(default_factory=dict)  # the user's settings: flags, files and key=value
    own: argparse.Namespace = field(default_factory=argparse.Namespace)  # the command's own flags


def _is_folder(word: str) -> bool:
    """Return whether a bare word is a folder. A mistyped preset or flag must not become a run directory."""
    return "/" in word or "\\" in word or os.path.isdir(word)


def _run_folder(name: str) -> str:
    """Raise ConfigError for a folder with files that do not belong to a run."""
    files = set(os.listdir(name)) if os.path.isdir(name) else set()
    if files and not files & {"run.json", "checkpoints", ".lock"}:
        raise ConfigError(
            f"{name}: exists, but is not a run directory; give a new folder, or --dataset {name} to train on its files"
        )
    return name


def _named_folder(argv: Sequence[str], key: Key) -> str | None:
    """Return the folder that argv names without a flag or by this key, or None."""
    takes_no_value = {k.flag for kind in ARCHITECTURES for k in keys(kind).values() if bool in k.kinds} | {SMALL}
    found = None
    for before, word in itertools.pairwise(["", *argv]):
        flag, equals, text = word.partition("=")
        if before == key.flag or (equals and flag in (key.flag, key.path, key.short)):
            found = text if before != key.flag else word
        elif not word.startswith("-") and not equals and _is_folder(word):
            follows_flag = before.startswith("--") and "=" not in before and before not in takes_no_value
            found = found if follows_flag else word
    return found


def _last_named(argv: Sequence[str], key: str, found: str | None = None) -> str | None:
    """Return the last value of a top-level key, before anything is checked: it decides which keys exist."""
    for word, follows in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        flag, equals, text = word.partition("=")
        text = text if equals else follows
        if flag == "--config":
            with contextlib.suppress(ConfigError):
                root = nodes_of(text)
                top = root.value if isinstance(root, yaml.MappingNode) else []
                found = next((str(child.value) for name, child in top if name.value == key), found)
        elif flag.replace("_", "-") == f"--{key.replace('_', '-')}" or (flag == key and equals):
            found = text
    return found


def _kind(argv: Sequence[str], found: str = OURS) -> str:
    """Load the kits that argv names, and return the model kind."""
    kits.use(_value_or_none(_last_named(argv, "kit")))
    named = _last_named(argv, "model_kind", found)
    return named if named in ARCHITECTURES else OURS  # type: ignore[return-value]


def _value_or_none(text: str | None) -> str | None:
    return None if text is None or text.strip().lower() in ("none", "null", "~", "") or text.startswith("--") else text


def _scan(argv: Sequence[str], own_flags: Sequence[str], folder: str | None = None, kind: str = OURS) -> tuple[Settings, bool]:
    """Apply argv from left to right; return the settings and whether --print-config was given.

    `folder` is the path of the key that a folder without a flag sets.
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
                    raise ConfigError(f"two folders were given, {alone} and {token}; give only one")
                alone = _run_folder(token)
                continue
            if not equals or not flag:
                hint = f", or a run directory with a slash, such as runs/{token}" if folder is not None else ""
                raise ConfigError(f"unexpected argument {token!r}; write --flag value or section.key=value{hint}")
            with at(f"override {token}"):
                if (key := find(flag, kind=kind)) is None:
                    guess, valid = find(flag, loose=True, kind=kind), [*known, *(k.short for k in known.values())]
                    hint = f"; did you mean {guess.path}?" if guess else did_you_mean(flag, valid)
                    hint = other_kind_hint(flag, kind) or hint
                    raise ConfigError(f"unknown key {flag}{hint or '; --help lists them all'}")
                settings[key.path] = (convert(key, text, key.path), f"override {token}")
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
            hint = other_kind_hint(short, kind) or hint
            raise ConfigError(f"unknown flag {flag}{hint or '; --help lists them all'}")
        else:
            is_bool = key is not None and bool in key.kinds
            if not equals:
                follows = rest[0] if rest else "--"
                # -1 is a value; -x and --seed are flags, which a forgotten value must not swallow.
                takes = follows.lower() in BOOLS if is_bool else re.match(r"(?!-)|-[\d.]|-inf$", follows)
                text = rest.pop(0) if takes else "true" if is_bool else ""
            if key is not None:
                value = convert(key, text, flag)
                before, origin = settings.get(key.path, ("", ""))
                if key.metadata["weighted"] and origin == f"flag {flag}" and before != value:
                    # The last one does not win here: a user who names two datasets wants both.
                    if bare := [part for part in (before, value) if not weighted_parts(part)]:
                        raise ConfigError(f"{flag} was given twice; a mixture needs weights: {flag} {bare[0]}:0.5")
                    value = f"{before},{value}"
                settings[key.path] = (value, f"flag {flag}")
            elif text:
                typed = {path: setting for path, setting in settings.items() if setting[1].startswith(_TYPED)}
                read_yaml(text, settings, kind)
                _note_replaced(typed, settings)
            else:
                raise ConfigError("--config needs a value, the name of a YAML file")
    if folder is not None and alone is not None:  # overrides files, like a flag
        before, origin = settings.get(folder, (None, ""))
        if origin.startswith(("flag", "override")):
            raise ConfigError(f"two folders were given, {before} and {alone}; give only one")
        settings[folder] = (convert(known[folder], alone, folder), f"argument {alone}")
    return settings, print_config


def _note_replaced(typed: Settings, settings: Settings) -> None:
    """Print a note for each setting that was typed before a file and replaced by it."""
    for path, (value, origin) in typed.items():
        now, file = settings[path]
        if now != value:
            log.warning(f"note: {file} sets {path} to {now}, after {origin} {value}; name --config first to keep {value}")


def with_origins(error: ConfigError, parsed: Parsed) -> ConfigError:
    """Return the error with the origins of the settings it names, unless they were typed."""
    text, values, remarks = str(error), parsed.config.to_dict(), []
    for path, key in keys(parsed.config.model_kind).items():
        origin, value = parsed.origins[path], key.of(values)
        named = rf"(?<![\w-])(?:{re.escape(key.flag)}|{re.escape(path)}) {re.escape(str(value))}(?![\w.])"
        if not origin.startswith((*_TYPED, "default", "preset", "argument", "the run")) and (match := re.search(named, text)):
            remarks.append(f"{match[0]} from {origin}")
    if not remarks:
        return ConfigError(text)
    remark = f"({', '.join(remarks)})"
    # After a command, the remark would be typed with it.
    return ConfigError(f"{remark} {text}" if " -m nash_mhc." in text else f"{text} {remark}")


def _resolve_length(settings: Settings) -> None:
    """Resolve epochs against total steps: a typed one overrides one in a file; two typed ones are an error."""
    epochs, steps = (settings.get(f"train.{name}") for name in ("epochs", "total_steps"))
    if epochs is None or steps is None or epochs[0] is None:
        return
    typed = [origin.startswith(_TYPED) for _, origin in (epochs, steps)]
    if all(typed):
        raise ConfigError(
            f"--epochs {epochs[0]:g} and --total-steps {steps[0]} both set the length of the run; leave out one of them"
        )
    if typed[1]:
        settings["train.epochs"] = (None, steps[1])


def _build(settings: Settings, found: Found, recorded: Settings, kind: str) -> tuple[RunConfig, dict[str, str]]:
    """Build the configuration from, lowest first: preset, inferred values, recorded settings, the user's settings."""
    known = keys(kind)
    settings = {path: setting for path, setting in recorded.items() if path in known} | settings
    size, size_origin = settings.get("model_size", (RunConfig.model_size, "default"))
    values = presets.run(size, kind).to_dict()
    origins = dict.fromkeys(known, f"preset {size}") | {"model_size": size_origin, "model_kind": "default"}
    preset = {path: key.of(values) for path, key in known.items()}
    given = {path: value for path, (value, _) in settings.items()}
    settings = {path: setting for path, setting in found(given, preset | given).items() if path not in settings} | settings
    # A short trial run of a preset should just work: unless the user set the warm-up, it is at most a tenth of the run.
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
    except ConfigError as error:  # keys that contradict each other: name their origins
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
    recorded: Recorded = lambda *_: {},
    examples: Sequence[str] | None = None,
) -> Parsed:
    """Parse a command line; raise ConfigError for any mistake; -h or --help prints the help and exits with 0.

    own: adds the command's flags (no positionals) to an argparse group; their values are in `Parsed.own`.
    found: called with the user's settings and all values; returns inferred settings, which the user's override.
    folder: path of the key that a folder without a flag sets.
    recorded: called with that folder and the user's settings; returns the settings recorded in its run.
    examples: arguments to show in --help instead of those of `train`.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    if own is not None:
        own(parser.add_argument_group("flags of this command"))
    if asked := [at for at, word in enumerate(argv) if word in ("-h", "--help")]:
        kind = _kind(argv)
        section = argv[asked[0] + 1 : asked[0] + 2]
        if section and not section[0].startswith("-"):
            print(section_help(section[0], kind), end="")
        else:
            shown_examples = {} if examples is None else {"examples": examples}
            text = usage(prog, folder=folder is not None, kind=kind, **shown_examples)
            print(text + (f"\n{parser.format_help()}" if own else ""), end="")
        raise SystemExit(0)
    namespace, rest = parser.parse_known_args(parser.dashed(argv)) if own else (argparse.Namespace(), list(argv))
    _kind(rest)
    named = None if folder is None else _named_folder(rest, keys()[folder])
    kind = _kind(rest, recorded(named, {}).get("model_kind", (OURS, ""))[0] if named is not None else OURS)
    settings, print_config = _scan(rest, [name for action in parser._actions for name in action.option_strings], folder, kind)
    _resolve_length(settings)
    if (kit := settings.get("kit")) is not None and kit[0] is not None:
        settings["kit"] = (kits.absolute(kit[0]), kit[1])
    given = {path: value for path, (value, _) in settings.items()}
    known = recorded(given[folder], given) if given.get(folder) is not None else {}  # type: ignore[index, arg-type]
    return Parsed(*_build(settings, found, known, kind), print_config, given, namespace)


def shown(parsed: Parsed) -> bool:
    """Print the configuration if --print-config asks for it, and return whether it did."""
    if parsed.print_config:
        print(render(parsed.config, parsed.origins), end="")
    return parsed.print_config
