"""What a folder of prepared rows holds, with a hash of every file: a changed or cut file is found when it is opened."""

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
_ALIGN = ModelConfig().alignment  # of documents in their rows, where nothing else is said
VERSION = 3  # of the files' form; another one cannot be read


class OlderForm(ConfigError):
    """Prepared by an earlier version; `recipe` is what it was made by."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.recipe, self.files = table(values, "recipe"), values.get("files") or []
        super().__init__(
            f"{folder}: was prepared by an earlier version (form {values['version']}, this one reads {VERSION}), which held "
            f"out parts of documents that it also trained on; make it anew: {again_command(folder, values)}"
        )


class Damaged(ConfigError):
    """A file that is not what it was when it was written."""


@dataclass(frozen=True)
class Shard:
    """One file of rows, and the file beside it that says which document each piece is from."""

    name: str  # without the endings .rows and .origins
    rows: int
    sha256: str
    origins_sha256: str


@dataclass(frozen=True)
class Split:
    shards: tuple[Shard, ...]
    tokens: int  # targets that count
    slots: int  # that text fills; the rest is padding and alignment
    documents: int
    most_documents: int  # in one row
    room: int | None  # slots for documents that start anywhere to start at multiples of the alignment; None: they do

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """`recipe` is everything that the rows follow from; `identity` stands for the rows themselves."""

    recipe: dict[str, Any]
    files: tuple[str, ...]  # that documents came from, by the number that origins use
    splits: dict[str, Split]
    bytes: int  # of text
    empty: int  # documents without text, left out
    about: dict[str, Any]  # where the data lay, what of it was left out, what is held out; the rows do not depend on it

    @property
    def identity(self) -> str:
        return digest_of({k: v for k, v in self.to_dict().items() if k != "about"})

    def padding(self, split: str) -> float:
        """Share of the slots that hold no text."""
        found = self.splits[split]
        return 1 - found.slots / max(1, found.rows * self.recipe["seq_len"])

    def summary(self) -> str:
        empty = f", {counted(self.empty, 'empty document')} left out" if self.empty else ""
        others = self.about.get("left_out")
        left_out = f"; not read: {counted_endings(others)} (--extensions)" if others else ""
        lines = [f"{self.bytes:,} bytes of text in {counted(len(self.files), 'file')}{empty}{left_out}"]
        for name, split in self.splits.items():
            lines.append(
                f"{name}: {counted(split.documents, 'document')}, {split.tokens:,} tokens that count, "
                f"{counted(split.rows, 'row')} of {self.recipe['seq_len']}, {self.padding(name):.1%} padding, "
                f"{counted(len(split.shards), 'shard')}"
            )
        return "\n".join([*lines, *filter(None, [self.about.get("held_out"), self.about.get("near_identical")])])

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Manifest:
        splits = {
            name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])})
            for name, split in values["splits"].items()
        }
        rest = {key: values[key] for key in ("recipe", "bytes", "empty", "about")}
        found = Manifest(files=tuple(values["files"]), splits=splits, **rest)
        found._check_types()
        return found

    def _check_types(self) -> None:
        """KeyError or TypeError for what was not written so: the readers of a manifest rely on it."""
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
        for what, kind in (("held_out", str), ("near_identical", str), ("dataset", str), ("left_out", dict)):
            if self.about.get(what) is not None:
                check_types(self.about, **{what: kind})

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, json.dumps(self.to_dict(), indent=1, sort_keys=True).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        again = "prepare the data again"
        values = read_json(folder / FILE, again, Damaged)
        with reading(folder / FILE, again, Damaged):
            if values["version"] < VERSION:
                raise OlderForm(folder, values)
            if values["version"] > VERSION:
                raise ConfigError(
                    f"{folder / FILE}: form {values['version']}, this version reads {VERSION}; update nash_mhc, or {again}"
                )
            return Manifest.from_dict(values)


def again_command(folder: Path, values: dict[str, Any]) -> str:
    """What to type to prepare the data of this manifest again;
    where it does not know the data's place, with a word for it."""
    recipe, files = values.get("recipe") or {}, values.get("files") or ["..."]
    dataset = (values.get("about") or {}).get("dataset") or (files[0] if len(files) == 1 else f"FOLDER_WITH_{files[0]}")
    words = ["prepare", "--dataset", dataset]
    defaults = {f.name: f.default for f in dataclasses.fields(DataConfig)} | {"format": "text", "template": TEMPLATE}
    for name in (name for name in recipe if name in defaults and recipe[name] != defaults[name] and name != "tokenizer"):
        value = str(recipe[name]).replace("\n", "\\n").replace("\t", "\\t")
        words += [f"--{name.replace('_', '-')}", value]
    if (align := recipe.get("align", _ALIGN)) != _ALIGN:
        words += ["--model-scales", "1"] if align == 1 else ["--model-scales", "2", "--model-ratio", str(align)]
    if (folder / "tokenizer").exists():
        words += ["--tokenizer", str(folder / "tokenizer")]
    return module_command("nash_mhc.data", *words, "--out", str(folder))


def write_file(path: Path, data: bytes) -> None:
    """All of the file or nothing of it. Losing power may lose it: its hash, which is checked, then says so."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a process that was left over may be writing the same file
    write_atomic(path, data, part=part, durable=False)


def check_files(folder: Path, expected: dict[str, tuple[int | None, str]]) -> None:
    """Compares files with their (size, hash); ConfigError names the first that differs."""
    again = "the data must be prepared again (remove the folder first)"
    for name, (size, _) in expected.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{folder / name}: is missing; {again}") from None
        if size is not None and found != size:
            raise Damaged(f"{folder / name}: has {found:,} bytes instead of {size:,}; {again}")
    found_digests = digests_of_files(folder / name for name in expected)
    for (name, (_, digest)), found_digest in zip(expected.items(), found_digests, strict=True):
        if digest != found_digest:
            raise Damaged(f"{folder / name}: its content has changed since it was prepared; {again}")
