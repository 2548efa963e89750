"""The manifest of a prepared folder: counts, settings, and a hash of every file, checked when the folder is opened."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nash_mhc.config.commands import module_command
from nash_mhc.config.humanize import counted
from nash_mhc.config.schema import TEMPLATE, ConfigError, DataConfig, ModelConfig
from nash_mhc.data.documents.files import counted_endings
from nash_mhc.storage.files import digest_of, digests_of_files, write_atomic
from nash_mhc.storage.json_files import check_types, read_json, reading, table

FILE = "manifest.json"
_DEFAULT_ALIGN = ModelConfig().alignment
VERSION = 3  # of the file format; other versions cannot be read
_AGAIN = "prepare the data again"


class OlderForm(ConfigError):
    """A folder prepared by an earlier version, with `recipe` and `files` of its manifest."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.recipe, self.files = table(values, "recipe"), values.get("files") or []
        super().__init__(
            f"{folder}: was prepared by an earlier version (form {values['version']}, this one reads {VERSION}), which also "
            f"trained on parts of held-out documents; prepare it again: {again_command(folder, values)}"
        )


class Damaged(ConfigError):
    """A file that has changed since it was written."""


@dataclass(frozen=True)
class Shard:
    """A file of rows, and a file of origins, which has the source of each piece."""

    name: str  # without .rows and .origins
    rows: int
    sha256: str
    origins_sha256: str


@dataclass(frozen=True)
class Split:
    shards: tuple[Shard, ...]
    tokens: int  # targets in the loss
    slots: int  # filled with text; the rest is padding and alignment
    documents: int
    most_documents: int  # in one row
    room: int | None  # longest row once its documents are moved to multiples of the alignment; None: they start there

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    recipe: dict[str, Any]  # everything that the rows depend on
    files: tuple[str, ...]  # source files, by the number that origins use
    splits: dict[str, Split]
    bytes: int  # of text
    empty: int  # skipped documents without text
    about: dict[str, Any]  # metadata that does not affect the rows: dataset, ignored files, notes

    @property
    def identity(self) -> str:
        """A digest of the rows."""
        return digest_of({k: v for k, v in self.to_dict().items() if k != "about"})

    @property
    def notes(self) -> list[str]:
        """Notes on held-out documents and near-duplicates."""
        return [note for name in ("held_out", "near_identical") if (note := self.about.get(name))]

    def padding(self, split: str) -> float:
        """Return the share of slots without text."""
        return 1 - self.splits[split].slots / max(1, self.splits[split].rows * self.recipe["seq_len"])

    def summary(self) -> str:
        empty = f", {counted(self.empty, 'empty document')} skipped" if self.empty else ""
        ignored = self.about.get("left_out")
        left_out = f"; not read: {counted_endings(ignored)} (--extensions)" if ignored else ""
        lines = [f"{self.bytes:,} bytes of text in {counted(len(self.files), 'file')}{empty}{left_out}"]
        for name, split in self.splits.items():
            lines.append(
                f"{name}: {counted(split.documents, 'document')}, {split.tokens:,} tokens in the loss, "
                f"{counted(split.rows, 'sequence')} of {self.recipe['seq_len']}, {self.padding(name):.1%} padding, "
                f"{counted(len(split.shards), 'shard')}"
            )
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Manifest:
        splits = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in values["splits"].items()
        }
        rest = {key: values[key] for key in ("recipe", "bytes", "empty", "about")}
        manifest = Manifest(files=tuple(values["files"]), splits=splits, **rest)
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        """KeyError, TypeError or ValueError for values that no version wrote."""
        check_types(vars(self), recipe=dict, bytes=int, empty=int, about=dict)
        check_types(self.recipe, seq_len=int, align=int, content=str, split=str, eval_split=str, validation_fraction=float)
        check_types(self.recipe["tokenizer"], fingerprint=str, vocab_size=int, end=int)
        for split in self.splits.values():
            check_types(vars(split), tokens=int, slots=int, documents=int, most_documents=int)
            for shard in split.shards:
                check_types(vars(shard), name=str, rows=int, sha256=str, origins_sha256=str)
                if Path(shard.name).name != shard.name:
                    raise ValueError(f"{shard.name!r} is not in this folder")
        if not all(isinstance(name, str) for name in self.files):
            raise TypeError("files must be names")
        kinds = {"held_out": str, "near_identical": str, "dataset": str, "left_out": dict}
        check_types(self.about, **{name: kind for name, kind in kinds.items() if self.about.get(name) is not None})

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, json.dumps(self.to_dict(), indent=1, sort_keys=True).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        values = read_json(folder / FILE, _AGAIN, Damaged)
        with reading(folder / FILE, _AGAIN, Damaged):
            if values["version"] < VERSION:
                raise OlderForm(folder, values)
            if values["version"] > VERSION:
                raise ConfigError(f"{folder / FILE}: form {values['version']}, not {VERSION}; update nash_mhc, or {_AGAIN}")
            return Manifest.from_dict(values)


def again_command(folder: Path, values: dict[str, Any]) -> str:
    """Return the command that prepares the data of a manifest again, with a placeholder if its dataset is unknown."""
    recipe, files = values.get("recipe") or {}, values.get("files") or ["..."]
    dataset = (values.get("about") or {}).get("dataset") or (files[0] if len(files) == 1 else f"FOLDER_WITH_{files[0]}")
    words = ["prepare", "--dataset", dataset]
    defaults = {f.name: f.default for f in dataclasses.fields(DataConfig)} | {"format": "text", "template": TEMPLATE}
    for name in (name for name in recipe if name in defaults and recipe[name] != defaults[name] and name != "tokenizer"):
        value = str(recipe[name]).replace("\n", "\\n").replace("\t", "\\t")
        words += [f"--{name.replace('_', '-')}", value]
    if (align := recipe.get("align", _DEFAULT_ALIGN)) != _DEFAULT_ALIGN:
        words += ["--model-scales", "1"] if align == 1 else ["--model-scales", "2", "--model-ratio", str(align)]
    if (folder / "tokenizer").exists():
        words += ["--tokenizer", str(folder / "tokenizer")]
    return module_command("nash_mhc.data", *words, "--out", str(folder))


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically. It may be lost with power; its hash, which is checked, then shows that."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a leftover process may be writing the same file
    write_atomic(path, data, part=part, durable=False)


def check_files(folder: Path, expected: dict[str, tuple[int | None, str]]) -> None:
    """Compare files with their (size, hash); Damaged names the first that differs."""
    remedy = "remove the folder and prepare the data again"
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{folder / name}: is missing; {remedy}") from None
        if size is not None and found != size:
            raise Damaged(f"{folder / name}: has {found:,} bytes instead of {size:,}; {remedy}")
    digests = digests_of_files(folder / name for name in expected)
    for (name, (_, digest)), found_digest in zip(expected.items(), digests, strict=True):
        if digest != found_digest:
            raise Damaged(f"{folder / name}: its content has changed since it was prepared; {remedy}")
