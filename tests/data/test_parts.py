"""Train, validation and test parts: disjoint."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import BYTES, prepared, texts, write_jsonl

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents.holdout import EVALUATED, TESTED, TRAINED_ON, by_share, choose_held_out
from nash_mhc.data.pack import RowSource
from nash_mhc.data.sources import open_held_out, open_source, open_test

PARTS = ("train", "validation", "test")


def documents(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}/{i} " + "word " * rng.randrange(8) for i in range(count)]


def read(source: RowSource, rows: int) -> set[str]:
    taken = source.take(np.arange(rows))
    return {BYTES.decode(t[(s == n) & (w > 0)]) for _, t, s, w in zip(*taken, strict=True) for n in range(1, s.max() + 1)}


@pytest.mark.parametrize(("validation", "test"), [(0.3, 0.4), (0.0, 0.3), (0.4, 0.3)])
def test_no_document_is_in_two_parts_prepared_or_streamed(tmp_path: Path, validation: float, test: float) -> None:
    for seed, count in ((0, 12), (1, 60), (2, 360)):  # each looked at, and by its key alone
        every = documents(count, seed)
        file = tmp_path / f"{seed}.parquet"
        pq.write_table(pa.table({"text": every + every[::3]}), file, row_group_size=200)  # a third of them twice
        shares = {"validation_fraction": validation, "test_fraction": test}
        manifest = prepared(tmp_path / f"{seed}", file, **shares)
        found = {name: texts(tmp_path / f"{seed}", name) for name in PARTS if name in manifest.splits}
        assert set(found) == {*PARTS} - ({"validation"} if not validation else set())
        assert sorted(text for part in found.values() for text in part) == sorted(every + every[::3])
        assert sum(len({*part}) for part in found.values()) == count  # all copies in one part
        if count < 300:
            continue
        assert len({*found["test"]}) == pytest.approx(test * count, rel=0.35)
        assert f"for the test: {len(found['test']):,} of {len(every + every[::3]):,} documents" in manifest.summary()
        cfg = DataConfig(dataset=str(file), streaming=True, cache_dir=str(tmp_path / "cache"), **shares)
        opened = {"train": open_source(cfg, BYTES, split="train", seed=0), "validation": open_held_out(cfg, BYTES)}
        opened["test"] = open_test(cfg, BYTES)
        for name, source in opened.items():
            assert (source is None) == (name not in found)
            if source is not None:
                assert read(source, 8) <= {*found[name]}
        assert len({source.identity for source in opened.values() if source is not None}) == len(found)
        assert opened["train"].held_out.endswith(f"{test:.1%} for the test, chosen while streaming")


def test_the_rule_gives_every_part_a_document() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        sizes = {rng.getrandbits(64): int(rng.lognormvariate(8, 1.5)) + 1 for _ in range(rng.randrange(3, 40))}
        validation, test = rng.choice([(0.05, 0.1), (0.4, 0.5), (0.9, 0.05), (0.01, 0.02)])
        rule = choose_held_out(sizes.items(), validation, test)
        assert {rule.part_of(key) for key in sizes} == {TRAINED_ON, EVALUATED, TESTED}
    assert {choose_held_out([(1, 9), (2, 9)], 0.0, 0.5).part_of(key) for key in (1, 2)} == {TRAINED_ON, TESTED}
    keys = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64).tolist()
    rule, without = by_share(0.05, 0.1), by_share(0.05)
    shares = [np.mean([rule.part_of(key) == part for key in keys]) for part in (TRAINED_ON, EVALUATED, TESTED)]
    assert shares == pytest.approx([0.85, 0.05, 0.1], abs=0.01)
    assert all((without.part_of(key) == EVALUATED) == (rule.part_of(key) == EVALUATED) for key in keys)


def test_the_test_part_comes_from_the_manifest(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", documents(300, 0))
    plain = DataConfig(dataset=str(file), cache_dir=str(tmp_path / "cache"))
    tested = DataConfig(dataset=str(file), cache_dir=plain.cache_dir, test_fraction=0.1)
    sources = [open_source(cfg, BYTES, split="train", seed=0) for cfg in (plain, tested)]
    assert sources[0].identity != sources[1].identity
    assert open_test(plain, BYTES) is None
    of_cache = open_test(tested, BYTES)
    assert of_cache is not None
    prepared(tmp_path / "out", file, align=1, test_fraction=0.1)
    of_folder = open_test(DataConfig(dataset=str(tmp_path / "out")), BYTES)  # without naming the test part
    assert of_folder is not None
    assert read(of_folder, len(of_folder)) == read(of_cache, len(of_cache))
    mixed = open_test(DataConfig(dataset=f"{tmp_path}/out:0.5,stories:0.5", test_fraction=0.1), BYTES)
    assert mixed is not None
    assert mixed.name == str(tmp_path / "out")
    prepared(tmp_path / "plain", file, align=1)
    assert open_test(DataConfig(dataset=str(tmp_path / "plain")), BYTES) is None
    with pytest.raises(
        ConfigError, match=r"plain: was prepared without the test split 'test'; prepare the data again with --test-fra"
    ):
        open_source(DataConfig(dataset=str(tmp_path / "plain"), test_fraction=0.1), BYTES, split="train", seed=0)
    with pytest.raises(
        ConfigError,
        match=r"out: contains other data \(test_fraction 0\.1 in that folder, None in this command, test_split test",
    ):
        prepared(tmp_path / "out", file, align=1)


def test_data_without_a_test_part_keeps_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions wrote these folder names and rows, which resumed runs must find."""
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"{i}?", "response": f"{i}!"} for i in range(300)]
    Path("qa.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Path("notes.txt").write_text("some text, and more of it. " * 300)
    for name, settings, folder, rows in (
        ("qa.jsonl", {}, "ec025bd44e9b057a0f8006fb", "a13665ba1cb8972108418cd8"),
        ("qa.jsonl", {"template": "{content} "}, "0ba2d08dc87e8fe248d98979", "089d7626725e2e7c21a99b19"),
        ("notes.txt", {"seq_len": 64}, "efeeeeeab9817478de4ab807", "20c04a5c1393d75cc5a83eb0"),
    ):
        source = open_source(DataConfig(dataset=name, **settings), BYTES, split="train", seed=0, align=16)  # type: ignore[arg-type]
        assert source.identity.startswith(rows)
        assert sorted(os.listdir(f".cache/data/{folder}")) == sorted(
            ["manifest.json", *(f"{split}-00000.{kind}" for split in ("train", "validation") for kind in ("rows", "origins"))]
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"test_split": "final"},
            "--test-split final: the data has no such split; .*--test-fraction",
        ),
        ({"test_split": "validation"}, "--test-split validation: is already the --eval-split"),
        ({"test_fraction": 0.1, "eval_split": "test"}, "--test-split test: is already the --eval-split"),
        (
            {"test_fraction": 0.1, "max_documents": 2},
            "--test-fraction 0.1: 2 different documents .*3 ",
        ),
    ],
)
def test_impossible_test_splits_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", documents(30, 0))
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", **settings)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(ConfigError, match="--dataset stories: has no test split; leave out --test-fraction"):
        open_test(DataConfig(test_fraction=0.1), BYTES)
