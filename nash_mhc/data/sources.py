"""From what the configuration names to rows:
the built-in stories, prepared folders, files, the Hub, mixtures of them."""

from __future__ import annotations

import dataclasses
import glob
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.fields import Settings
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, DataConfig, weighted_parts
from nash_mhc.data.documents.hub import Hub, is_saved
from nash_mhc.data.documents.readers import Corpus, Files, Stories
from nash_mhc.data.mixture import Mixture, NothingHeldOut, RowSource
from nash_mhc.data.order import permuted
from nash_mhc.data.prepared.manifest import FILE, VERSION, Damaged, Manifest
from nash_mhc.data.prepared.prepare import prepare
from nash_mhc.data.prepared.progress import watching
from nash_mhc.data.prepared.rows import PreparedRows
from nash_mhc.data.prepared.taught import TaughtRows, read_about
from nash_mhc.data.recipe import make_recipe
from nash_mhc.data.stories.corpus import SPLITS, StoryCorpus, StoryRows
from nash_mhc.data.streamed_rows import open_stream
from nash_mhc.data.tokenizer import ByteTokenizer, Tokenizer
from nash_mhc.storage.files import digest_of
from nash_mhc.storage.folders import model_name

_SAMPLE = 2512_24880  # which rows are evaluated: any number, but for ever the same


class Opening(NamedTuple):
    """What rows are asked for."""

    cfg: DataConfig
    tokenizer: Tokenizer
    split: str
    seed: int
    align: int  # documents start at multiples of this


class DataSource(NamedTuple):
    """How some names of --dataset become rows."""

    takes: Callable[[str, str], bool]  # whether a --dataset with this --format is one of them
    open: Callable[[Opening], RowSource]
    # Settings that follow from the dataset, of (all values by path); ConfigError where they do not fit it.
    infers: Callable[[Mapping[str, Any]], Settings] = lambda values: {}
    has_test: bool = True  # whether a part of it can be a test at the end


def _open_stories(asked: Opening) -> RowSource:
    if asked.split not in SPLITS:
        raise ConfigError(f"split {asked.split!r}: there are {' and '.join(SPLITS)}")
    if asked.cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {asked.cfg.dataset_name}: dataset 'stories' has no variants; leave it out")
    return StoryRows(asked.tokenizer, seed=asked.seed, split=asked.split, seq_len=asked.cfg.seq_len, align=asked.align)


def _open_prepared(asked: Opening) -> RowSource:
    cfg, folder = asked.cfg, Path(asked.cfg.dataset)
    _check_recipe(folder, cfg, asked.tokenizer, asked.align)
    return PreparedRows(folder, asked.split, vocab_size=asked.tokenizer.vocab_size, name=cfg.dataset)


# What takes no name here is read as documents: files, folders, globs and Hugging Face datasets.
SOURCES: Registry[DataSource] = Registry(
    "sources",
    {
        "stories": DataSource(lambda name, form: name == "stories", _open_stories, has_test=False),
        "prepared": DataSource(lambda name, form: (Path(name) / FILE).exists(), _open_prepared),
    },
)


def source_of(dataset: str, form: str) -> DataSource | None:
    """Return the registered source of a dataset; None for documents."""
    return next((source for source in SOURCES.values() if source.takes(dataset, form)), None)


def _open_documents(asked: Opening) -> RowSource:
    cfg, tokenizer, split, seed, align = asked
    if cfg.streaming:
        hub = Hub(cfg.dataset.removeprefix("hf:"), cfg) if _is_hub(cfg.dataset) else None
        return open_stream(cfg, tokenizer, split=split, seed=seed, align=align, hub=hub)
    return _open_in_cache(cfg, tokenizer, split, align)


def _is_hub(dataset: str) -> bool:
    return dataset.startswith("hf:") or is_saved(Path(dataset)) or not (Path(dataset).exists() or model_name(dataset) is None)


def parts_of(cfg: DataConfig) -> list[tuple[DataConfig, str]]:
    """The parts of a mixture, each as a dataset of its own, with their weights; empty where it is none."""
    if Path(cfg.dataset).exists():
        return []
    return [(dataclasses.replace(cfg, dataset=name), weight) for name, weight in weighted_parts(cfg.dataset)]


def open_corpus(cfg: DataConfig) -> Corpus:
    """The documents of --dataset; ConfigError when there is nothing of that name."""
    if parts_of(cfg):
        raise ConfigError(f"--dataset {cfg.dataset}: is a mixture; prepare its parts, each by itself, and mix the folders")
    if cfg.dataset == "stories":
        return Stories(cfg)
    if _is_hub(cfg.dataset):
        return Hub(cfg.dataset.removeprefix("hf:"), cfg)
    if Path(cfg.dataset).exists() or glob.has_magic(cfg.dataset):
        if cfg.dataset_name is not None:
            raise ConfigError(f"--dataset-name {cfg.dataset_name}: {cfg.dataset} has no variants; leave it out")
        return Files(cfg.dataset, cfg)
    raise ConfigError(
        f"--dataset {cfg.dataset}: neither 'stories' nor a file or folder that is here; one of Hugging Face is hf:{cfg.dataset}"
    )


def _open_in_cache(cfg: DataConfig, tokenizer: Tokenizer, split: str, align: int) -> PreparedRows:
    """Prepared in a folder whose name follows from the content and all settings;
    where that was damaged, prepared anew."""
    corpus = open_corpus(cfg)
    recipe = make_recipe(cfg, tokenizer, corpus, align)
    folder = Path(cfg.cache_dir) / digest_of([VERSION, recipe])[:24]

    def prepared() -> PreparedRows:
        with watching(f"preparing {cfg.dataset}") as watch:
            prepare(recipe, tokenizer, corpus, folder, dataset=cfg.dataset, watch=watch)
        return PreparedRows(folder, split, vocab_size=tokenizer.vocab_size, name=cfg.dataset)

    try:
        return prepared()
    except Damaged as damage:
        print(f"--dataset {cfg.dataset}: its prepared copy is damaged ({damage}); preparing it anew", file=sys.stderr)
        shutil.rmtree(folder)
        return prepared()


def _check_recipe(folder: Path, cfg: DataConfig, tokenizer: Tokenizer, align: int) -> None:
    """A prepared folder that was given by name must suit the run."""
    recipe = Manifest.read(folder).recipe
    if recipe["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        own = folder / "tokenizer"
        remedy = f"use --tokenizer {own if own.exists() else 'bytes'}"
        raise ConfigError(f"--dataset {folder}: was not prepared with --tokenizer {cfg.tokenizer}; {remedy}")
    if (has_none := "begin" in recipe["tokenizer"]) != (tokenizer.begin is None):
        flag, how = ("--no-begin-with-end", "without a") if has_none else ("--begin-with-end", "with the end token as their")
        raise ConfigError(f"--dataset {folder}: its documents were prepared {how} begin token, this run's are not; add {flag}")
    if recipe["seq_len"] != cfg.seq_len:
        raise ConfigError(
            f"--dataset {folder}: its rows have {recipe['seq_len']} tokens, the run's {cfg.seq_len}; "
            f"use --seq-len {recipe['seq_len']}, or prepare it again"
        )
    if recipe["align"] % align:
        raise ConfigError(
            f"--dataset {folder}: its documents start at multiples of {recipe['align']}, this model needs {align}; "
            f"prepare it again with the run's --model-size, --model-ratio and --model-scales"
        )
    if cfg.test_part not in (None, recipe.get("test_split")):
        raise ConfigError(
            f"--dataset {folder}: was prepared without a test part {cfg.test_part!r}; prepare it again with --test-fraction or "
            "--test-split, or leave them out"
        )


def open_source(
    cfg: DataConfig, tokenizer: Tokenizer, *, split: str, seed: int, align: int = 1, temperature: float | None = None
) -> RowSource:
    """The rows of one split, documents starting at multiples of `align`;
    ConfigError when there is no such dataset or split. With a temperature, a teacher has read them, at that one."""
    if temperature is not None:
        return _open_taught(cfg, tokenizer, split, align, temperature)
    if parts := parts_of(cfg):
        sources = [open_source(part, tokenizer, split=split, seed=seed, align=align) for part, _ in parts]
        return Mixture([part.dataset for part, _ in parts], sources, [weight for _, weight in parts], seed=seed)
    source = source_of(cfg.dataset, cfg.format)
    return (_open_documents if source is None else source.open)(Opening(cfg, tokenizer, split, seed, align))


def _open_taught(cfg: DataConfig, tokenizer: Tokenizer, split: str, align: int, temperature: float) -> RowSource:
    folder = Path(cfg.dataset)
    read_about(folder)  # says what is missing where it is no such folder
    _check_recipe(folder, cfg, tokenizer, align)
    return TaughtRows(folder, split, temperature, vocab_size=tokenizer.vocab_size, name=cfg.dataset)  # type: ignore[return-value]


def open_held_out(
    cfg: DataConfig, tokenizer: Tokenizer, *, align: int = 1, temperature: float | None = None
) -> RowSource | None:
    """The rows to evaluate on, the same for every run on this data;
    None where none are held out (--validation-fraction 0).

    Of a mixture, they are those of its parts that have some.
    """
    if parts := parts_of(cfg):
        return _mixed([(part, weight, open_held_out(part, tokenizer, align=align)) for part, weight in parts])
    try:
        return open_source(cfg, tokenizer, split=cfg.eval_split, seed=0, align=align, temperature=temperature)
    except NothingHeldOut:
        return None


def open_test(cfg: DataConfig, tokenizer: Tokenizer, *, align: int = 1, temperature: float | None = None) -> RowSource | None:
    """The rows for a test at the end, which are neither trained nor evaluated on;
    None where none were asked for (--test-fraction, --test-split). A prepared folder knows by itself.

    Of a mixture, they are those of its parts that have some.
    """
    if parts := parts_of(cfg):
        asked = [(part, weight) for part, weight in parts if part.dataset != "stories"]
        return _mixed([(part, weight, open_test(part, tokenizer, align=align)) for part, weight in asked])
    name, folder = cfg.test_part, Path(cfg.dataset)
    if (folder / FILE).exists():
        name = Manifest.read(folder).recipe.get("test_split", name)
    source = source_of(cfg.dataset, cfg.format)
    if name is not None and source is not None and not source.has_test:
        raise ConfigError(f"--dataset {cfg.dataset}: has no test part; leave out --test-fraction and --test-split")
    return None if name is None else open_source(cfg, tokenizer, split=name, seed=0, align=align, temperature=temperature)


def _mixed(found: list[tuple[DataConfig, str, RowSource | None]]) -> RowSource | None:
    held = [(part.dataset, source, weight) for part, weight, source in found if source is not None]
    return Mixture([n for n, _, _ in held], [s for _, s, _ in held], [w for _, _, w in held], seed=0) if held else None


def fixed_sample(source: RowSource, count: int) -> np.ndarray:
    """Numbers of rows that stand for the whole source, the same for everyone;
    a larger sample begins with the smaller one.

    Of a mixture, each part has its share of them, or all that it has.
    """
    if isinstance(source, Mixture):
        positions = np.arange(count)
        return positions[source.is_new(positions)]
    count = min(count, len(source))
    return np.arange(count) if source.endless else permuted(np.arange(count), len(source), _SAMPLE)


def loss_floor(cfg: DataConfig, tokenizer: Tokenizer) -> tuple[float, float] | None:
    """(nats a token, bits a byte) below which no model can go, where the dataset knows it."""
    if cfg.dataset == "stories" and isinstance(tokenizer, ByteTokenizer):
        corpus = StoryCorpus()
        return corpus.floor_nats_per_token, corpus.floor_bits_per_byte
    return None
