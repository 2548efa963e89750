"""Open a dataset as rows: built-in stories, prepared folders, files, Hugging Face datasets, and mixtures of them."""

from __future__ import annotations

import dataclasses
import glob
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nash_mhc.config.fields import Settings
from nash_mhc.config.kits import Registry
from nash_mhc.config.schema import ConfigError, DataConfig, weighted_parts
from nash_mhc.data.documents.files import Corpus, Files
from nash_mhc.data.documents.hub import Hub, is_saved
from nash_mhc.data.order import BLOCK, assign_sources, counts_before, exact_shares, permuted
from nash_mhc.data.pack import NothingHeldOut, Rows, RowSource
from nash_mhc.data.prepared.folder import FILE, VERSION, Damaged, Manifest, PreparedRows
from nash_mhc.data.prepared.prepare import prepare
from nash_mhc.data.recipe import make_recipe
from nash_mhc.data.stories import SPLITS, Stories, StoryRows, lowest_loss
from nash_mhc.data.streamed_rows import open_stream
from nash_mhc.data.tokenizer import ByteTokenizer, Tokenizer
from nash_mhc.data.workers import progress
from nash_mhc.storage.files import digest_of
from nash_mhc.storage.folders import model_name

log = logging.getLogger(__name__)
_SAMPLE_KEY = 2512_24880  # of the permutation that chooses the evaluated rows; never change it


class Mixture(RowSource):
    """Endless rows of several sources by weight; finite sources are reread in a new order each epoch."""

    def __init__(self, names: Sequence[str], sources: Sequence[RowSource], weights: Sequence[str], *, seed: int) -> None:
        self.names, self._sources, self._seed = list(names), list(sources), seed
        self.name = ", ".join(names)
        if not sum(map(float, weights)) or min(exact_shares(weights)) * BLOCK < 1:
            raise ConfigError(f"--dataset {names[0]}:{weights[0]} ...: each weight must be at least 1/{BLOCK} of their sum")
        if len(set(names)) < len(names):
            repeated = max(names, key=list(names).count)
            raise ConfigError(f"--dataset: {repeated} was given twice; give it once with the total weight")
        self._shares = exact_shares(weights)
        self.identity = digest_of([[source.identity for source in sources], [str(share) for share in self._shares]])
        self.held_out = "; ".join(f"{source.name}: {source.held_out}" for source in sources if source.held_out)
        most = [source.most_documents for source in sources]
        self.most_documents = None if None in most else max(n for n in most if n is not None)
        self.padded_length = max((s.padded_length for s in sources if s.padded_length is not None), default=None)

    def epochs(self, position: int) -> dict[str, float]:
        counts = counts_before(position, self._shares)
        entries = zip(self.names, self._sources, counts, strict=True)
        return {name: count / len(source) for name, source, count in entries if not source.endless}

    def __len__(self) -> int:
        """Return the rows before any source starts over."""
        finite = [(s, share) for s, share in zip(self._sources, self._shares, strict=True) if not s.endless]
        return min((int(len(source) / share) for source, share in finite), default=sys.maxsize)

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        """Return which positions are in the first epoch of their source."""
        owners, inner = assign_sources(positions, self._shares, seed=self._seed)
        return inner < np.array([sys.maxsize if source.endless else len(source) for source in self._sources])[owners]

    def locate(self, position: int, seed: int) -> tuple[RowSource, int]:
        owners, inner = assign_sources(np.array([position]), self._shares, seed=self._seed)
        number = int(owners[0])
        return self._sources[number], int(self._sources[number].rows_at(inner, self._seed, number)[0])

    def take(self, indices: np.ndarray | list[int]) -> Rows:
        owners, inner = assign_sources(np.asarray(indices), self._shares, seed=self._seed)
        numbers = np.unique(owners).tolist()
        own = {number: self._sources[number].rows_at(inner[owners == number], self._seed, number) for number in numbers}
        taken = [self._sources[number].take(rows) for number, rows in own.items()]
        back = np.argsort(np.concatenate([np.flatnonzero(owners == number) for number in numbers]), kind="stable")
        return Rows(*(np.concatenate(arrays)[back] for arrays in zip(*taken, strict=True)))


class OpenRequest(NamedTuple):
    """The arguments of `DataSource.open`."""

    cfg: DataConfig
    tokenizer: Tokenizer
    split: str
    seed: int
    align: int  # documents start at multiples of this


Opener = Callable[[OpenRequest], RowSource]


class DataSource(NamedTuple):
    """A kind of dataset: which --dataset values it takes, and how they become rows."""

    takes: Callable[[str, str], bool]  # of (--dataset, --format)
    open: Opener
    # Infers settings from the dataset, given all values by path; raises ConfigError if a value does not fit.
    infers: Callable[[Mapping[str, Any]], Settings] = lambda values: {}
    has_test: bool = True  # can part of it be held out as a final test?


def _open_stories(request: OpenRequest) -> RowSource:
    cfg = request.cfg
    if request.split not in SPLITS:
        raise ConfigError(f"split {request.split!r}: dataset 'stories' has only {' and '.join(SPLITS)}")
    if cfg.dataset_name is not None:
        raise ConfigError(f"--dataset-name {cfg.dataset_name}: dataset 'stories' has no subsets; leave it out")
    return StoryRows(request.tokenizer, seed=request.seed, split=request.split, seq_len=cfg.seq_len, align=request.align)


def _open_prepared(request: OpenRequest) -> RowSource:
    cfg, folder = request.cfg, Path(request.cfg.dataset)
    check_recipe(folder, cfg, request.tokenizer, request.align)
    return PreparedRows(folder, request.split, vocab_size=request.tokenizer.vocab_size, name=cfg.dataset)


# Other names are read as documents: files, folders, globs and Hugging Face datasets.
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


def _is_hub(dataset: str) -> bool:
    return dataset.startswith("hf:") or is_saved(Path(dataset)) or not (Path(dataset).exists() or model_name(dataset) is None)


def parts_of(cfg: DataConfig) -> list[tuple[DataConfig, str]]:
    """Return the datasets of a mixture with their weights; empty if --dataset is not a mixture."""
    if Path(cfg.dataset).exists():
        return []
    return [(dataclasses.replace(cfg, dataset=name), weight) for name, weight in weighted_parts(cfg.dataset)]


def open_corpus(cfg: DataConfig) -> Corpus:
    """Open the documents of --dataset; raise ConfigError if it does not exist."""
    if parts_of(cfg):
        raise ConfigError(f"--dataset {cfg.dataset}: is a mixture; prepare each dataset and mix the prepared folders")
    if cfg.dataset == "stories":
        return Stories(cfg)
    if _is_hub(cfg.dataset):
        return Hub(cfg.dataset.removeprefix("hf:"), cfg)
    if Path(cfg.dataset).exists() or glob.has_magic(cfg.dataset):
        if cfg.dataset_name is not None:
            raise ConfigError(f"--dataset-name {cfg.dataset_name}: {cfg.dataset} has no subsets; leave it out")
        return Files(cfg.dataset, cfg)
    name = cfg.dataset
    raise ConfigError(f"--dataset {name}: neither 'stories' nor a file or folder; for a Hugging Face dataset use hf:{name}")


def _open_documents(request: OpenRequest) -> RowSource:
    """Open documents as a stream, or prepare them in the cache, in a folder named by content and settings, if they are
    missing or damaged there."""
    cfg, tokenizer, split, seed, align = request
    if cfg.streaming:
        return open_stream(cfg, tokenizer, split=split, seed=seed, align=align, is_hub=_is_hub(cfg.dataset))
    corpus = open_corpus(cfg)
    recipe = make_recipe(cfg, tokenizer, corpus, align)
    folder = Path(cfg.cache_dir) / digest_of([VERSION, recipe])[:24]

    def prepared() -> PreparedRows:
        with progress(f"preparing {cfg.dataset}") as report:
            prepare(recipe, tokenizer, corpus, folder, dataset=cfg.dataset, report=report)
        return PreparedRows(folder, split, vocab_size=tokenizer.vocab_size, name=cfg.dataset)

    try:
        return prepared()
    except Damaged as damage:
        log.warning(f"--dataset {cfg.dataset}: its prepared copy is damaged ({damage}); preparing it again")
        shutil.rmtree(folder)
        return prepared()


def check_recipe(folder: Path, cfg: DataConfig, tokenizer: Tokenizer, align: int) -> None:
    """Raise ConfigError if a prepared folder does not fit the run."""
    recipe, name = Manifest.read(folder).recipe, f"--dataset {folder}"
    if recipe["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        own = folder / "tokenizer"
        remedy = f"use --tokenizer {own if own.exists() else 'bytes'}"
        raise ConfigError(f"{name}: was not prepared with --tokenizer {cfg.tokenizer}; {remedy}")
    if (no_begin := "begin" in recipe["tokenizer"]) != (tokenizer.begin is None):
        flag, how = ("--no-begin-with-end", "without a") if no_begin else ("--begin-with-end", "with the end token as")
        raise ConfigError(f"{name}: the documents were prepared {how} begin token, unlike this run's; add {flag}")
    if recipe["seq_len"] != cfg.seq_len:
        T = recipe["seq_len"]
        raise ConfigError(f"{name}: prepared with sequence length {T}, but this run uses {cfg.seq_len}; use --seq-len {T}")
    if recipe["align"] % align:
        needed = f"its documents start at multiples of {recipe['align']}, this model needs {align}"
        raise ConfigError(
            f"{name}: {needed}; prepare the data again with the run's --model-size, --model-ratio and --model-scales"
        )
    if cfg.test_part not in (None, recipe.get("test_split")):
        remedy = "prepare the data again with --test-fraction or --test-split, or leave them out"
        raise ConfigError(f"{name}: was prepared without the test split {cfg.test_part!r}; {remedy}")


def open_source(
    cfg: DataConfig, tokenizer: Tokenizer, *, split: str, seed: int, align: int = 1, opener: Opener | None = None
) -> RowSource:
    """Open the rows of one split, with documents at multiples of `align`; raise ConfigError if there is no such split.

    `opener` opens the dataset instead of the registered sources (`Feed.opener`).
    """
    if opener is not None:
        return opener(OpenRequest(cfg, tokenizer, split, seed, align))
    if parts := parts_of(cfg):
        sources = [open_source(part, tokenizer, split=split, seed=seed, align=align) for part, _ in parts]
        return Mixture([part.dataset for part, _ in parts], sources, [weight for _, weight in parts], seed=seed)
    source = source_of(cfg.dataset, cfg.format)
    return (_open_documents if source is None else source.open)(OpenRequest(cfg, tokenizer, split, seed, align))


def open_held_out(cfg: DataConfig, tokenizer: Tokenizer, *, align: int = 1, opener: Opener | None = None) -> RowSource | None:
    """Open the validation rows, which are the same for every run on this data; None without held-out data.

    For a mixture, these are the validation rows of all its datasets, mixed.
    """
    if parts := parts_of(cfg):
        return _mix([(part, weight, open_held_out(part, tokenizer, align=align)) for part, weight in parts])
    try:
        return open_source(cfg, tokenizer, split=cfg.eval_split, seed=0, align=align, opener=opener)
    except NothingHeldOut:
        return None


def open_test(cfg: DataConfig, tokenizer: Tokenizer, *, align: int = 1, opener: Opener | None = None) -> RowSource | None:
    """Open the rows of the final test; None without --test-fraction, --test-split or a prepared test part.

    For a mixture, these are the validation rows of all its datasets, mixed.
    """
    if parts := parts_of(cfg):
        finite = [(part, weight) for part, weight in parts if part.dataset != "stories"]
        return _mix([(part, weight, open_test(part, tokenizer, align=align)) for part, weight in finite])
    split, folder = cfg.test_part, Path(cfg.dataset)
    if (folder / FILE).exists():
        split = Manifest.read(folder).recipe.get("test_split", split)
    source = source_of(cfg.dataset, cfg.format)
    if split is not None and source is not None and not source.has_test:
        raise ConfigError(f"--dataset {cfg.dataset}: has no test split; leave out --test-fraction and --test-split")
    return None if split is None else open_source(cfg, tokenizer, split=split, seed=0, align=align, opener=opener)


def _mix(parts: list[tuple[DataConfig, str, RowSource | None]]) -> RowSource | None:
    present = [(part.dataset, source, weight) for part, weight, source in parts if source is not None]
    return Mixture(*zip(*present, strict=True), seed=0) if present else None


def fixed_sample(source: RowSource, count: int) -> np.ndarray:
    """Return the numbers of `count` rows that represent the source, the same for every run.

    A larger sample begins with the smaller one. Each dataset of a mixture has its share, or all its rows.
    """
    if isinstance(source, Mixture):
        positions = np.arange(count)
        return positions[source.is_new(positions)]
    count = min(count, len(source))
    return np.arange(count) if source.endless else permuted(np.arange(count), len(source), _SAMPLE_KEY)


def loss_floor(cfg: DataConfig, tokenizer: Tokenizer) -> tuple[float, float] | None:
    """Return the lowest possible loss as (nats/token, bits/byte); None if unknown."""
    return lowest_loss() if cfg.dataset == "stories" and isinstance(tokenizer, ByteTokenizer) else None
