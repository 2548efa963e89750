"""Read YAML files of settings: check every key and report mistakes with their line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.fields import Settings, check_scheme
from nash_mhc.config.keys import at, convert, find, keys, other_kind_hint, sections
from nash_mhc.config.recorded import is_inherited, is_run_json, is_unused
from nash_mhc.config.schema import ConfigError


def nodes_of(file: str) -> yaml.nodes.Node | None:
    """Return the settings in a file; for a run.json, the settings that its run was started with."""
    root = _composed(file)
    top = {name.value: child for name, child in root.value if _is_text(name)} if isinstance(root, yaml.MappingNode) else {}
    if not is_run_json({*top}):
        return root
    as_asked = "settings" in top
    which = "settings" if as_asked else "config"
    settings: yaml.nodes.Node = top[which]
    if isinstance(settings, yaml.MappingNode):
        unused = {name for name, values in values_of(file)[which].items() if is_unused(name, values)}
        settings.value = [(name, child) for name, child in settings.value if name.value not in unused]
        for section, child in settings.value:
            if isinstance(child, yaml.MappingNode):
                keep = lambda name, section=section: is_inherited(f"{section.value}.{name.value}", as_asked=as_asked)
                child.value = [(name, value) for name, value in child.value if keep(name)]
    return settings


def _is_text(node: yaml.nodes.Node) -> bool:
    return isinstance(node, yaml.ScalarNode)


def _composed(file: str) -> yaml.nodes.Node | None:
    check_scheme("--config", file)
    return _parsed(file, "--config cannot read", lambda text: yaml.compose(text, Loader=yaml.SafeLoader))


def values_of(file: str) -> Any:
    """Return the plain values of a YAML file; may raise ConfigError."""
    return _parsed(file, "cannot read", yaml.safe_load)


def _parsed(file: str, cannot: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(Path(file).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{cannot} {file}: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # invalid dates and numbers are ValueErrors
        mark = getattr(error, "problem_mark", None)
        plain = str(error) if isinstance(error, ValueError) else "nested too deeply"
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or plain
        raise ConfigError(f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {what}") from None


def read_yaml(file: str, settings: Settings, kind: str) -> None:
    """Apply one YAML file. Reads the node tree, which has line numbers and the text of each scalar."""
    known = keys(kind)
    lines: dict[str, int] = {}

    def walk(node: yaml.nodes.Node | None, section: str) -> None:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
            return  # an empty file, or a section with all keys commented out
        if not isinstance(node, yaml.MappingNode):
            start = f"{file}:{node.start_mark.line + 1}"
            raise ConfigError(f"{start}: {section or 'the file'} must contain lines of the form 'key: value'")
        for name_node, child in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "[...]"
            path = f"{section}.{name}" if section else name
            line = name_node.start_mark.line + 1
            with at(f"{file}:{line}"):
                if path in lines:
                    raise ConfigError(f"{path} is set twice, first on line {lines[path]}; keep one of them")
                lines[path] = line
                # A dotted name is a path for key=value only; in a file the sections are nested.
                if (path not in known or "." in name) and (section or name not in sections()):
                    raise ConfigError(_misplaced(name, section, kind))
                if path in known:
                    if not isinstance(child, yaml.ScalarNode):
                        raise ConfigError(f"{path} takes a single value, not a list or a section")
                    value = convert(known[path], child.value, path, quoted=child.style is not None)
                    settings[path] = (value, f"{file}:{line}")
            if path not in known:
                walk(child, name)

    walk(nodes_of(file), "")


def _misplaced(name: str, section: str, kind: str) -> str:
    """Return the error for an unknown or misplaced name: where it belongs, the nearest key, or all keys."""
    if section == "model" and (hint := other_kind_hint(f"model.{name}", kind)):
        return f"unknown key model.{name}{hint}"
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
    return f"unknown key {section + '.' if section else ''}{name}{hint or '; choose from ' + ', '.join(here)}"
