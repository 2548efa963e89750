"""The keys of a run: their names (path, flag and short form), and conversion of text to their types."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nash_mhc.config import fields as declared
from nash_mhc.config import kits, presets
from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import (
    ARCHITECTURES,
    KIT_SECTIONS,
    ConfigError,
    ModelConfig,
    RunConfig,
    Section,
    accepted_types,
    check_field,
    expand_home,
    section_classes,
)

SMALL = "--use-small-model"  # the same as --model-size small
# Names in other frameworks: never accepted, only used for "did you mean".
NICKNAMES = {
    "lr": "learning_rate", "steps": "total_steps", "bs": "batch_size", "use_small_model": "model_size",
    "global_batch_size": "batch_size", "device_type": "platform", "device": "platform", "arch": "model_kind",
    "hidden_size": "width", "num_heads": "heads",
}  # fmt: skip


# Sections of optional features, which `--help` only names; `--help SECTION` shows one.
FURTHER = {
    "objective": "objectives other than next-token cross-entropy",
    "layers": "layer types: mixers, feed-forward networks, layer patterns",
    "hub": "features of imported models; --init-from sets them from a Hugging Face folder",
    "tuning": "fine-tuning: templates, epochs, early stopping, the final checkpoint",
    "lora": "LoRA fine-tuning of the model in --init-from",
    "precision": "precision and memory: dtypes of weights, moments and matmuls, remat",
    "defaults": "default batch size and learning rate for a device type (--profile-for)",
    "telemetry": "telemetry: Weights & Biases, JSON logs, profiles, samples",
}


def further() -> dict[str, str]:
    """Return the optional sections by name, each with its line of help; those of kits last."""
    return FURTHER | {name: kind.about for name, kind in KIT_SECTIONS.items()}


@dataclass(frozen=True)
class Key:
    """One leaf of RunConfig under its three names: path `data.batch_size`, flag `--batch-size`, short `batch_size`."""

    path: str
    flag: str
    annotation: Any
    metadata: Mapping[str, Any]

    @property
    def short(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def section(self) -> str:
        """Return the section of `--help` that shows the key."""
        return self.metadata.get("further") or self.path.rpartition(".")[0]

    @property
    def kinds(self) -> tuple[type, ...]:
        return accepted_types(self.annotation)

    @property
    def help(self) -> str:
        """Return the help text with the names that kits add."""
        offered = kits.provided(self.metadata["seam"]) if self.metadata.get("seam") else []
        return self.metadata["help"] + (f"; from kits: {', '.join(offered)}" if offered else "")

    def of(self, values: Mapping[str, Any]) -> Any:
        section, _, name = self.path.rpartition(".")
        return (values[section] if section else values)[name]


OURS = ModelConfig.architecture


def keys(kind: str = OURS) -> dict[str, Key]:
    """Return every key of a RunConfig with this kind of model, by path, in the order of the schema."""
    return _keys(kind, tuple(ARCHITECTURES), tuple(section_classes(kind).items()))


@functools.cache
def _keys(model_kind: str, kinds: tuple[str, ...], sections: tuple[tuple[str, type[Section]], ...]) -> dict[str, Key]:
    found: list[Key] = []
    hints = typing.get_type_hints(RunConfig)
    for top in dataclasses.fields(RunConfig):
        if not top.metadata:  # a section
            continue
        metadata = dict(top.metadata, choices=presets.sizes(model_kind)) if top.name == "model_size" else top.metadata
        found.append(Key(top.name, "--" + top.name.replace("_", "-"), hints[top.name], metadata))
        if top.name == "model_size":
            about = "model kind; --help KIND lists the keys of a kind"
            of_kind = declared.key(OURS, about, choices=kinds).metadata
            found.append(Key("model_kind", "--model-kind", str, of_kind))
    for name, kind in sections:
        inner = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            flag = f.metadata["flag"] or (f"{name}-" if kind.prefixed else "") + f.name.replace("_", "-")
            found.append(Key(f"{name}.{f.name}", f"--{flag}", inner[f.name], f.metadata))
    return {key.path: key for key in found}


def key_of_any_kind(path: str) -> Key:
    """Return the key with this path, from any kind of model."""
    return next(keys(kind)[path] for kind in ARCHITECTURES if path in keys(kind))


def sections() -> list[str]:
    return list(dict.fromkeys(path.split(".")[0] for path in keys() if "." in path))


def find(name: str, *, loose: bool = False, kind: str = OURS) -> Key | None:
    """Return the key with this path or short form; `loose` also matches the last component, for hints."""
    found = [key for key in keys(kind).values() if name in (key.path, key.short)]
    last = name.rsplit(".", maxsplit=1)[-1]
    last = (NICKNAMES | kits.nicknames()).get(last, last)
    found += [key for key in keys(kind).values() if loose and last in (key.path.split(".")[-1], key.short)]
    return found[0] if found else None


def other_kind_hint(name: str, kind: str) -> str:
    """Return a remark on a name that this kind of model has no key for: it was removed, or another kind has it."""
    for path, instead in declared.REMOVED.items():
        if name in (path, path.replace(".", "_")):
            return f": {path} was removed; {instead}"
    for other in ARCHITECTURES:
        if (key := find(name, kind=other, loose=True)) is not None and find(name, kind=kind, loose=True) is None:
            return f": {key.path} is a key of --model-kind {other}, and this is {kind}"
    return ""


BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def convert(key: Key, text: str, name: str, *, quoted: bool = False) -> Any:
    """Convert text to the key's type and check it; `name` is what the user called the key."""
    word = text.strip().lower()
    if not word:
        raise ConfigError(f"{name} needs a value")
    value: Any = expand_home(text) if key.metadata["path"] else text
    # Quotes in YAML keep the literal text, and "none" is an ordinary word where the key cannot be None (--remat none).
    choices = key.metadata["choices"] or ()
    may_be_none = not quoted and (not choices or type(None) in key.kinds)
    is_none = may_be_none and (word in ("null", "~") or (word == "none" and type(None) in key.kinds))
    with contextlib.suppress(KeyError, ValueError):  # a value left as text fails the check below
        if is_none:
            value = None
        elif bool in key.kinds:
            value = BOOLS[word]
        elif float in key.kinds:
            value = float(word)
        elif int in key.kinds:
            # Accept 1e4 for an integer, but do not pass plain digits through a float: they would lose precision.
            value = int(word) if re.fullmatch(r"[+-]?[\d_]+", word) else float(word)
            value = int(value) if isinstance(value, int) or value.is_integer() else text
    try:
        check_field(name, value, key.annotation, key.metadata)
    except ConfigError as error:
        raise ConfigError(f"{error}{did_you_mean(text, choices)}") from None
    return value
