"""Held-out documents: whole ones, all copies of a text in one split, and a representative sample for evaluation."""

import gzip
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import BYTES, prepared, stories, texts, write_jsonl

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data import recipe as recipe_module
from nash_mhc.data.documents.holdout import TRAINED_ON, HeldOut, choose_held_out, key_of
from nash_mhc.data.prepared import chunks
from nash_mhc.data.prepared.folder import Manifest, PreparedRows
from nash_mhc.data.recipe import Document
from nash_mhc.data.sources import fixed_sample, open_held_out, open_source
from nash_mhc.data.stories import StoryRows

ROOT = Path(__file__).parents[2]


def documents(count: int, seed: int = 0) -> list[str]:
    """Distinct documents of very different lengths."""
    rng = random.Random(seed)
    return [f"{seed} {i} " + "word " * min(750, int(rng.lognormvariate(4, 0.8))) for i in range(count)]


def sides(folder: Path) -> tuple[set[str], set[str]]:
    return set(texts(folder)), set(texts(folder, "validation"))


@pytest.mark.parametrize("small_chunks", [False, True])
def test_copies_of_a_text_are_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: bool) -> None:
    """A hundred copies of each of twenty texts, in files of every kind, in any order and in many chunks."""
    if small_chunks:
        monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 20_000)
    repeated, rest = documents(20), documents(300, seed=1)
    lines = repeated * 97 + rest
    random.Random(0).shuffle(lines)
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl.gz", lines)
    for number, text in enumerate(repeated):
        (folder / f"{number}.txt").write_text(text)
        (folder / f"{number}.md").write_bytes(b"\xef\xbb\xbf" + text.encode())  # the same text behind a mark
        (folder / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    manifest = prepared(tmp_path / "out", folder, seq_len=4096)
    train, held_out = sides(tmp_path / "out")
    assert not train & held_out
    assert train | held_out == {*repeated, *rest}
    assert held_out
    assert len(manifest.splits["train"].shards) > 5 or not small_chunks
    counts = [Counter(texts(tmp_path / "out", split)) for split in ("train", "validation")]
    assert {count[text] for count in counts for text in repeated} == {0, 100}


def test_a_repeated_text_counts_as_one_document(tmp_path: Path) -> None:
    text = " ".join(map(str, range(2000)))
    write_jsonl(tmp_path / "a.jsonl", [text] * 100)
    manifest = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    train, held_out = sides(tmp_path / "out")
    assert held_out
    assert not train & held_out
    assert "there is only one document" in manifest.summary()


@pytest.mark.parametrize("words", [70, 400, 40_000])
def test_a_single_document_is_held_out_by_rows_with_a_notice(tmp_path: Path, words: int) -> None:
    (tmp_path / "book.txt").write_text(" ".join(map(str, range(words))))
    manifest = prepared(tmp_path / "out", tmp_path / "book.txt", seq_len=64)
    train, held_out = sides(tmp_path / "out")
    assert train
    assert held_out
    assert not train & held_out
    assert manifest.summary().splitlines()[-1].startswith("there is only one document: ")
    share = len(held_out) / (len(train) + len(held_out))
    assert share < 0.5 if words < 1000 else share == pytest.approx(0.05, abs=0.02)


def test_a_document_read_in_blocks_is_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.documents.files.BLOCK", 1000)
    monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 3000)
    (tmp_path / "books").mkdir()
    for number in range(12):
        text = "".join(f"book {number}, line {i}\n" for i in range(300))
        (tmp_path / "books" / f"{number}.txt").write_text(text)
        (tmp_path / "books" / f"copy of {number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    manifest = prepared(tmp_path / "out", tmp_path / "books", seq_len=64)
    train, held_out = (set(re.findall(r"book \d+(?=, line)", "|".join(side))) for side in sides(tmp_path / "out"))
    assert not train & held_out
    assert train | held_out == {f"book {number}" for number in range(12)}
    assert (manifest.splits["train"].documents, manifest.splits["validation"].documents) == (22, 2)


def test_a_few_documents_give_about_their_share_and_never_most_of_the_text() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = {rng.getrandbits(64): int(rng.lognormvariate(8, 1.5)) + 1 for _ in range(rng.randrange(2, 200))}
        rule = choose_held_out(sizes.items(), 0.05)
        held_out = sum(size for key, size in sizes.items() if rule.part_of(key) != TRAINED_ON)
        assert 0 < held_out < sum(sizes.values())
        assert held_out <= max(0.1 * sum(sizes.values()), min(sizes.values()))
    rng = np.random.default_rng(0)
    many = dict.fromkeys(rng.integers(0, 2**64, 20_000, np.uint64).tolist(), 1000)
    rule = choose_held_out(many.items(), 0.05)
    assert sum(rule.part_of(key) != TRAINED_ON for key in many) / len(many) == pytest.approx(0.05, abs=0.005)
    assert choose_held_out([(1, 10)], 0.05).by_piece
    assert choose_held_out([(1, 10), (1, 10)], 0.05).by_piece
    assert choose_held_out([(1, 10), (2, 10)], 0.0) == HeldOut()


def test_survey_reads_no_more_documents_than_needed() -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            read += 1
            yield key_of([str(read).encode()]), 100

    assert choose_held_out(endless(), 0.05).below == int(0.05 * 2**64)
    assert read == 2000


def test_streaming_and_preparing_hold_out_the_same_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": documents(2500)}), tmp_path / "a.parquet", row_group_size=100)
    prepared(tmp_path / "out", tmp_path / "a.parquet", seq_len=4096)
    cfg = DataConfig(dataset=str(tmp_path / "a.parquet"), seq_len=4096, streaming=True, cache_dir=str(tmp_path / "cache"))
    stream = open_held_out(cfg, BYTES, align=8)
    assert stream is not None
    taken = stream.take(np.arange(8))
    first = [BYTES.decode(t[(s == n) & (w > 0)]) for _, t, s, w in zip(*taken, strict=True) for n in range(1, s.max() + 1)]
    assert set(first) <= set(texts(tmp_path / "out", "validation"))


# --- the sample that is evaluated ------------------------------------------------------------------------------------


LIKELY = 1.63  # what chance stays below in 99 of 100 cases


def lengths(source: Any, rows: np.ndarray) -> np.ndarray:
    """Return the length of every document in these rows."""
    segments = source.take(rows).segments
    return np.concatenate([np.unique(row[row > 0], return_counts=True)[1] for row in segments])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two distributions (Kolmogorov and Smirnov's),
    in units of what chance would make of it."""
    at = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max() / np.sqrt(1 / len(a) + 1 / len(b)))


def test_the_fixed_sample_has_typical_document_lengths(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", documents(6_000))
    prepared(tmp_path / "out", tmp_path / "a.jsonl", validation_fraction=0.5, seq_len=1024)
    split = PreparedRows(tmp_path / "out", "validation")
    whole, sample = np.arange(len(split)), fixed_sample(split, 128)
    assert len(set(sample.tolist())) == 128 < len(split) / 4
    assert apart(lengths(split, sample), lengths(split, whole)) < LIKELY
    assert apart(lengths(split, whole[:128]), lengths(split, whole)) > 5  # the first rows are no sample: the longest come first
    np.testing.assert_array_equal(fixed_sample(split, 64), sample[:64])
    stories_ = StoryRows(BYTES, seed=0, split="validation", seq_len=4096)
    assert apart(lengths(stories_, fixed_sample(stories_, 40)), lengths(stories_, np.arange(256))) < LIKELY


def test_the_fixed_sample_of_a_mixture_has_each_share(tmp_path: Path) -> None:
    for name, count in (("many", 400), ("few", 3)):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i} " + "words " * 30 for i in range(count)])
    cfg = DataConfig(
        dataset=f"{tmp_path}/many.jsonl:0.5,{tmp_path}/few.jsonl:0.5", seq_len=64, cache_dir=str(tmp_path / "cache"),
        validation_fraction=0.3,
    )  # fmt: skip
    held_out = open_held_out(cfg, BYTES)
    assert held_out is not None
    sample = fixed_sample(held_out, 64)
    found = [held_out.locate(int(position), seed=0) for position in sample]
    assert len({(source.name, row) for source, row in found}) == len(found)  # none twice
    counts = Counter(Path(source.name).stem for source, _ in found)
    (few,) = {len(source) for source, _ in found if "few" in source.name}
    assert counts["few"] == few
    assert counts["many"] >= 24
    assert sample.tolist() == fixed_sample(held_out, 128)[: len(sample)].tolist()


def test_equal_train_and_eval_splits_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["words " * 30] * 9)
    with pytest.raises(ConfigError, match="--eval-split train: is the training split"):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", eval_split="train")


def test_a_long_text_is_processed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.documents.files.BLOCK", 1000)
    monkeypatch.setattr("nash_mhc.data.recipe._SURVEYED_BYTES", 3000)
    monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 1000)
    sizes: list[int] = []
    tokenized = recipe_module.pieces_of

    def measured(documents: list[Document], *args: Any) -> Any:
        sizes.append(sum(document.size for document in documents))
        return tokenized(documents, *args)

    monkeypatch.setattr(recipe_module, "pieces_of", measured)  # where the first documents are looked at
    monkeypatch.setattr(chunks, "pieces_of", measured)  # and where chunks are made
    (tmp_path / "long.txt").write_text("some words of a long text. " * 4000)
    prepared(tmp_path / "out", tmp_path / "long.txt", align=16)
    assert max(sizes) <= 5000


# --- nothing held out, older folders, damage -------------------------------------------------------------------------


def test_nothing_is_held_out_with_validation_fraction_zero(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", stories(50))
    whole = DataConfig(dataset=str(tmp_path / "a.jsonl"), validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    assert open_held_out(whole, BYTES) is None
    assert open_source(whole, BYTES, split="train", seed=0).held_out == ""
    mixed = DataConfig(dataset=f"{whole.dataset}:0.5,stories:0.5", validation_fraction=0.0, cache_dir=whole.cache_dir)
    held_out = open_held_out(mixed, BYTES)
    assert held_out is not None
    assert held_out.name == "stories"
    (tmp_path / "short.txt").write_text("too short to be divided")
    short = DataConfig(dataset=str(tmp_path / "short.txt"), cache_dir=whole.cache_dir)
    with pytest.raises(ConfigError, match=r"short\.txt: has no rows of split 'validation' .splits: train.; add text"):
        open_held_out(short, BYTES)


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", stories(60))
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    old = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(old | {"version": 2}))
    for start in (lambda: Manifest.read(tmp_path / "out"), lambda: prepared(tmp_path / "out", tmp_path / "a.jsonl")):
        with pytest.raises(ConfigError, match=r"manifest\.json: has format version 2, not 3; remove the folder and prepare"):
            start()


def test_a_damaged_copy_in_the_cache_is_prepared_again(tmp_path: Path, messages: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", stories(60))
    cfg = DataConfig(dataset=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    wanted = open_source(cfg, BYTES, split="train", seed=0)
    (folder,) = (tmp_path / "cache").iterdir()
    for name in ("train-00000.rows", "manifest.json"):
        (folder / name).write_text("{")
        again = open_source(cfg, BYTES, split="train", seed=0)
        assert again.identity == wanted.identity
        assert "a.jsonl: its prepared copy is damaged (" in messages.pop()
    shutil.rmtree(tmp_path / "cache")
