"""Preparing: the same bytes for any number of processes and restarts, little padding, damage is reported."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import DOCUMENTS, every_byte, prepared, stories, write_jsonl

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.prepared import prepare as prepare_module
from nash_mhc.data.prepared.folder import PreparedRows

ROOT = Path(__file__).parents[2]


# --- the same bytes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 900 kB of stories: nine of the small chunks that these tests set."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "stories.jsonl", stories(2000))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 100_000)


# The command with small chunks; none is begun any more once there are as many as it is to make:
# it waits there to be killed.
COMMAND = """
import os, sys, time, nash_mhc.data.recipe, nash_mhc.data.prepared.prepare as p, nash_mhc.data.__main__ as m
from nash_mhc.config.commands import one_line_errors

nash_mhc.data.recipe._SMALLEST, make_chunk = 100_000, p.make_chunk

def held(job, chunk):
    while len(list(job.folder.glob("chunk-*.json"))) >= int(os.environ["HOLD_AT"]):
        time.sleep(0.01)
    return make_chunk(job, chunk)

p.make_chunk = held
if __name__ == "__main__":
    sys.exit(one_line_errors(m.main))
"""


@pytest.mark.usefixtures("small_chunks")
def test_killed_resumed_and_parallel_preparations_give_the_same_bytes(tmp_path: Path, corpus_file: Path) -> None:
    whole = prepared(tmp_path / "whole", corpus_file)
    assert len(whole.splits["train"].shards) == 10
    wanted = every_byte(tmp_path / "whole")
    assert {name.split("-")[0].split(".")[0] for name in wanted} == {"train", "validation", "manifest"}
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    partial = tmp_path / "killed.partial"

    def start(workers: int, hold_at: int = 100) -> subprocess.Popen[bytes]:
        flags = ["--dataset", str(corpus_file), "--out", str(tmp_path / "killed"), "--workers", str(workers)]
        flags += ["--model-ratio", "8", "--model-scales", "2", "--model-window", "none"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "HOLD_AT": str(hold_at)}
        return subprocess.Popen([sys.executable, str(script), "prepare", *flags], env=env, stdout=subprocess.DEVNULL)

    done: list[int] = []
    for workers, enough in ((1, 2), (2, 5)):
        process = start(workers, hold_at=enough)
        while len(list(partial.glob("chunk-*.json"))) < enough and process.poll() is None:
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        started = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGKILL)
        process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in started):  # workers do not outlive it
            time.sleep(0.01)
        done.append(len(list(partial.glob("chunk-*.json"))))
        assert not (tmp_path / "killed").exists()
    assert 2 <= done[0] < done[1] < 10
    # One finished shard is damaged as a crash of the machine may do; it is made again.
    (partial / "train-00000.rows").write_bytes(b"cut")
    # Shards without a note are those of a worker that was killed between the two: they do not count as finished.
    notes = [json.loads(path.read_text()) for path in sorted(partial.glob("chunk-*.json")) if path.stem != "chunk-00000"]
    finished = [partial / f"{part['shard']['name']}.rows" for note in notes for part in note["splits"].values()]
    kept = {path.name: path.stat().st_mtime_ns for path in finished}
    assert len(notes) == done[1] - 1
    assert start(workers=2).wait() == 0
    assert every_byte(tmp_path / "killed") == wanted
    assert not partial.exists()
    # What was finished is not made again.
    assert {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.usefixtures("small_chunks")
def test_leftovers_of_other_settings_are_not_reused(tmp_path: Path, corpus_file: Path, monkeypatch: Any) -> None:
    real, calls = prepare_module.make_chunk, []

    def fails_after_three(job: Any, chunk: Any) -> Any:
        calls.append(chunk.number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(job, chunk)

    monkeypatch.setattr(prepare_module, "make_chunk", fails_after_three)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "out", corpus_file, seq_len=128)
    assert len(list((tmp_path / "out.partial").glob("chunk-*.json"))) == 3
    prepared(tmp_path / "out", corpus_file)
    prepared(tmp_path / "fresh", corpus_file)
    assert every_byte(tmp_path / "out") == every_byte(tmp_path / "fresh")


@pytest.mark.usefixtures("small_chunks")
def test_concurrent_preparations_of_the_same_data_run_once(tmp_path: Path, corpus_file: Path, monkeypatch: Any) -> None:
    """Processes of one run on one machine do this."""
    real, made = prepare_module.make_chunk, []
    monkeypatch.setattr(prepare_module, "make_chunk", lambda job, chunk: (made.append(chunk.number), real(job, chunk))[1])
    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(lambda _: prepared(tmp_path / "out", corpus_file), range(3)))
    assert manifests[0] == manifests[1] == manifests[2]
    assert sorted(made) == list(range(10))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_prepared_folders_are_used_or_refused_never_overwritten(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    first = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert prepared(tmp_path / "out", tmp_path / "a.jsonl") == first
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with pytest.raises(
        ConfigError, match=r"contains other data \(seq_len 256 in that folder, 128 in this command\); choose another --out"
    ):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", seq_len=128)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match=r"--out .*taken: already exists"):
        prepared(tmp_path / "taken", tmp_path / "a.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "taken"]


# --- packing
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "align"), [(2048, 16), (4096, 16)])
def test_padding_is_small(tmp_path: Path, corpus_file: Path, seq_len: int, align: int) -> None:
    manifest = prepared(tmp_path / "out", corpus_file, seq_len=seq_len, align=align)
    assert manifest.padding("train") < 0.05
    rows = PreparedRows(tmp_path / "out", "train")
    taken = rows.take(np.arange(len(rows)))
    assert taken.weights.sum() == manifest.splits["train"].tokens
    assert 1 - taken.weights.mean() == pytest.approx(manifest.padding("train"), abs=1e-6)
    changes = (np.diff(taken.segments, axis=1) != 0).sum(axis=1)
    # Attention sets room aside for as many as there can be, padding among them; more would be left out.
    assert 1 + changes.max() <= rows.most_documents == 1 + taken.segments.max()
    blocks = taken.segments.reshape(len(rows), -1, align)
    assert (blocks == blocks[:, :, :1]).all()


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_changed_truncated_or_missing_shard_is_reported(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    file = tmp_path / "out" / "train-00000.rows"
    good = file.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        flipped = bytearray(good)
        flipped[at] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"train-00000\.rows: .*content has changed"):
            PreparedRows(tmp_path / "out", "train")
    file.write_bytes(good[:-1])
    with pytest.raises(ConfigError, match=r"train-00000\.rows: has [\d,]+ bytes instead of [\d,]+"):
        PreparedRows(tmp_path / "out", "train")
    PreparedRows(tmp_path / "out", "validation")  # the other split is whole
    file.unlink()
    with pytest.raises(ConfigError, match=r"train-00000\.rows: is missing"):
        PreparedRows(tmp_path / "out", "train")
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json: cannot be read"):
        PreparedRows(tmp_path / "out", "train")


def test_a_token_outside_the_vocabulary_is_reported_with_its_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    rows = PreparedRows(tmp_path / "out", "train", vocab_size=200)
    bad = next(i for i in range(len(rows)) if PreparedRows(tmp_path / "out", "train")[i].inputs.max() >= 200)
    with pytest.raises(ConfigError, match=rf"row {bad} of its prepared train-00000\.rows: token \d+ is outside the voc"):
        rows.take([bad])


def test_threads_share_open_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 3000)
    write_jsonl(tmp_path / "a.jsonl", stories(200))
    prepared(tmp_path / "out", tmp_path / "a.jsonl", seq_len=64)
    whole = PreparedRows(tmp_path / "out", "train")
    wanted = whole.take(np.arange(len(whole))).inputs
    assert len(whole.shards) > 20
    for _ in range(8):
        # Fresh files each time, and a cache of two:
        # every read opens one, and lets go of one that another may be reading.
        rows = PreparedRows(tmp_path / "out", "train")
        rows.records = dataclasses.replace(rows.records, most_open=2)
        with ThreadPoolExecutor(8) as pool:
            for got in pool.map(lambda _, rows=rows: rows.take(np.arange(len(rows))).inputs, range(8)):
                np.testing.assert_array_equal(got, wanted)
