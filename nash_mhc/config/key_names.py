"""Every key of a run under its three names, derived from the fields in schema.py: path, flag and short form."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nash_mhc.config import fields as declared
from nash_mhc.config import presets
from nash_mhc.config.schema import (
    ARCHITECTURES,
    ModelConfig,
    RunConfig,
    accepted_types,
    architecture_config,
    section_class,
)

SMALL = "--use-small-model"  # the same as --model-size small
# What other frameworks call these keys: never accepted, only the source of a better "did you mean".
NICKNAMES = {
    "lr": "learning_rate", "steps": "total_steps", "bs": "batch_size", "use_small_model": "model_size",
    "global_batch_size": "batch_size", "device_type": "platform", "device": "platform", "arch": "model_kind",
    "H_cycles": "outer_cycles", "L_cycles": "inner_cycles", "halt_max_steps": "most_passes", "hidden_size": "width",
    "halt_exploration_prob": "explore", "num_heads": "heads", "spectral_radius": "radius", "reservoir_size": "units",
}  # fmt: skip


# What a run may do besides pretraining: --help names these sections, and --help SECTION shows one.
FURTHER = {
    "objective": "what is minimized, where it is not the next token's cross-entropy",
    "hub": "what models from elsewhere have and ours do not; --init-from sets it for a Hugging Face folder",
    "tuning": "fine-tuning: how questions and answers are written, how long a run is, which checkpoint is its own",
    "lora": "fine-tuning with adapters, of a model that --init-from names",
    "distill": "learning from a teacher: from its cache, or beside it on the same devices (--objective distill)",
    "quantize": "training with weights of two to four bits, as they will be used",
    "precision": "memory: weights and moments in half of it, what is kept for the way back; a larger model on the same chips",
    "profile": "the batch and the rate that suit a kind of device",
    "telemetry": "what is seen of a run: Weights & Biases, JSON for machines, a profile of its steps",
}


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
        """Whose help shows it: that of its own part of the configuration, or of what it is there for."""
        return self.metadata.get("further") or self.path.rpartition(".")[0]

    @property
    def kinds(self) -> tuple[type, ...]:
        return accepted_types(self.annotation)

    def of(self, values: Mapping[str, Any]) -> Any:
        section, _, name = self.path.rpartition(".")
        return (values[section] if section else values)[name]


OURS = ModelConfig.architecture


def keys(kind: str = OURS) -> dict[str, Key]:
    """Every leaf of the RunConfig of that kind of model by its path, in the order of the schema."""
    return _keys(kind, tuple(ARCHITECTURES))


@functools.cache
def _keys(model_kind: str, kinds: tuple[str, ...]) -> dict[str, Key]:
    found: list[Key] = []
    hints = typing.get_type_hints(RunConfig)
    for top in dataclasses.fields(RunConfig):
        kind = section_class(top)
        if kind is None:
            metadata = dict(top.metadata, choices=presets.sizes(model_kind)) if top.name == "model_size" else top.metadata
            found.append(Key(top.name, "--" + top.name.replace("_", "-"), hints[top.name], metadata))
            if top.name == "model_size":
                about = "kind of the model, each with keys and sizes of its own; --help KIND shows them"
                of_kind = declared.key(OURS, about, choices=kinds).metadata
                found.append(Key("model_kind", "--model-kind", str, of_kind))
            continue
        if top.name == "model":
            kind = architecture_config(model_kind)
        inner = typing.get_type_hints(kind)
        for f in dataclasses.fields(kind):  # type: ignore[arg-type]
            prefix = f"{top.name}-" if top.name in ("mesh", "model", "lora", "distill", "quantize") else ""
            flag = f.metadata["flag"] or prefix + f.name.replace("_", "-")
            found.append(Key(f"{top.name}.{f.name}", f"--{flag}", inner[f.name], f.metadata))
    return {key.path: key for key in found}


def of_any_kind(path: str) -> Key:
    """The key of that path, whichever kind of model has it."""
    return next(keys(kind)[path] for kind in ARCHITECTURES if path in keys(kind))


def sections() -> list[str]:
    return list(dict.fromkeys(path.split(".")[0] for path in keys() if "." in path))


def find(name: str, *, loose: bool = False, kind: str = OURS) -> Key | None:
    """The key with that path or short form; `loose` also goes by the last component, to guess what was meant."""
    found = [key for key in keys(kind).values() if name in (key.path, key.short)]
    last = name.rsplit(".", maxsplit=1)[-1]
    last = NICKNAMES.get(last, last)
    found += [key for key in keys(kind).values() if loose and last in (key.path.split(".")[-1], key.short)]
    return found[0] if found else None


def of_another_kind(name: str, kind: str) -> str:
    """What to add about a name that is not a key of this kind of model: it was removed, or another kind has it."""
    for path, instead in declared.REMOVED.items():
        if name in (path, path.replace(".", "_")):
            return f": {path} was removed; {instead}"
    for other in ARCHITECTURES:
        if (key := find(name, kind=other, loose=True)) is not None and find(name, kind=kind, loose=True) is None:
            return f": {key.path} is a key of --model-kind {other}, and this is {kind}"
    return ""
