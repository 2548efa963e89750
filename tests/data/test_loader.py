"""Batches: step k has the same rows for any number of processes, workers and restarts."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from corpora import prepared, take
from training_process import children_of

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.loader import batches, count_bytes
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import Mixture, RowSource, open_source
from nash_mhc.data.stories import StoryRows
from nash_mhc.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
T = 32


@pytest.fixture(scope="module")
def stories() -> StoryRows:
    return StoryRows(BYTES, seed=0, split="train", seq_len=T)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    folder: Path = tmp_path_factory.mktemp("text")
    (folder / "numbers.txt").write_text(" ".join(map(str, range(400))))
    cfg = DataConfig(dataset=str(folder / "numbers.txt"), seq_len=T, cache_dir=str(folder / "cache"))
    return open_source(cfg, BYTES, split="train", seed=0)


def keys(rows: Rows) -> list[bytes]:
    """Return one key per row, in the order of the batch."""
    flat = [a.reshape(-1, T) for a in rows]
    return [b"".join(a[i].tobytes() for a in flat) for i in range(len(flat[0]))]


def key(row: Rows) -> bytes:
    return b"".join(a.tobytes() for a in row)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> RowSource:
    """Two texts and the stories. The second text is read more than once in a few steps."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    (folder / "long.txt").write_text(" ".join(map(str, range(4000))))
    (folder / "short.txt").write_text(" ".join(map(str, range(9000, 9100))))
    parts = f"{folder}/long.txt:0.5,{folder}/short.txt:0.3,stories:0.2"
    cfg = DataConfig(dataset=parts, seq_len=T, cache_dir=str(folder / "cache"))
    return open_source(cfg, BYTES, split="train", seed=7)


SOURCES = ["stories", "text", "mixture"]


@pytest.fixture
def source(request: pytest.FixtureRequest) -> RowSource:
    return request.getfixturevalue(request.param)


def test_story_batches_are_the_rows_in_order(stories: StoryRows) -> None:
    got = take(stories, 3, grad_accum=2)
    assert [[a.shape for a in rows] for rows in got] == [[(2, 8, T)] * 4] * 3
    assert [k for rows in got for k in keys(rows)] == [key(stories[i]) for i in range(48)]
    assert isinstance(got[0], Rows)


@pytest.mark.parametrize("source", SOURCES, indirect=True)
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_share_the_rows_of_a_step(source: RowSource, processes: int) -> None:
    alone = take(source, 3, grad_accum=2, seed=5)
    parts = [take(source, 3, grad_accum=2, seed=5, share=(rank, processes)) for rank in range(processes)]
    for step, whole in enumerate(alone):
        mine = [part[step] for part in parts]
        assert all(rows.inputs.shape == (2, 8 // processes, T) for rows in mine)
        # The devices see the processes' rows side by side along the batch; each forward pass has the rows it should.
        joined = Rows(*(np.concatenate(arrays, axis=1) for arrays in zip(*mine, strict=True)))
        for part in range(2):
            assert Counter(keys(Rows(*(a[part] for a in joined)))) == Counter(keys(Rows(*(a[part] for a in whole))))
        # Row i of the batch is with process i mod processes, so that no row is read twice.
        assert [keys(rows) for rows in mine] == [keys(whole)[rank::processes] for rank in range(processes)]


@pytest.mark.parametrize("source", SOURCES, indirect=True)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_restarts_on_any_number_of_processes_read_the_same_steps(source: RowSource, processes: int) -> None:
    whole = take(source, 7, batch_size=4, grad_accum=2)
    assert len({k for rows in whole for k in keys(rows)}) > 20
    for start in range(1, 7):
        for rank in range(processes):
            rest = take(source, 7 - start, batch_size=4, grad_accum=2, start_step=start, share=(rank, processes))
            assert [keys(rows) for rows in rest] == [keys(rows)[rank::processes] for rows in whole[start:]]


def test_a_far_start_is_reached_at_once(stories: StoryRows) -> None:
    (rows,) = take(stories, 1, start_step=10**9)
    assert keys(rows)[0] == key(stories[8 * 10**9])


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_accumulated_batches_hold_the_rows_of_one_big_batch(source: RowSource) -> None:
    big = take(source, 2, batch_size=12, grad_accum=1)
    accumulated = take(source, 2, batch_size=3, grad_accum=4)
    for one, many in zip(big, accumulated, strict=True):
        assert one.inputs.shape == (1, 12, T)
        assert many.inputs.shape == (4, 3, T)
        assert keys(one) == keys(many)


def test_text_is_read_once_an_epoch_in_a_new_order_each_time(text: RowSource) -> None:
    count = len(text)
    assert count > 20
    got = [k for rows in take(text, 2 * count, batch_size=1, seed=3) for k in keys(rows)]
    everything = [key(text[i]) for i in range(count)]
    first, second = got[:count], got[count:]
    assert sorted(first) == sorted(second) == sorted(everything)
    assert first != everything
    assert first != second
    assert [k for rows in take(text, count, batch_size=1, seed=4) for k in keys(rows)] != first


def test_a_text_smaller_than_a_batch_is_repeated(text: RowSource) -> None:
    (rows,) = take(text, 1, batch_size=3 * len(text))
    assert set(Counter(keys(rows)).values()) == {3}


@contextlib.contextmanager
def storm_of_signals() -> Iterator[list[int]]:
    """Signals to every process that this one starts, from its first instruction on:
    a scheduler knows no main process."""
    sent: list[int] = []
    over = threading.Event()
    before = set(children_of(os.getpid()))

    def storm() -> None:
        while not over.is_set():
            for pid in set(children_of(os.getpid())) - before:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                        sent.append(pid)
            time.sleep(0.001)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


def test_workers_give_the_same_batches_and_ignore_signals(mixture: RowSource) -> None:
    """A mixture sends all its sources to the workers."""
    with storm_of_signals() as sent:
        with_worker = take(mixture, 5, workers=2, start_step=2, buffer=1)
    assert len(set(sent)) >= 2
    assert len(sent) > 100
    assert [keys(rows) for rows in with_worker] == [keys(rows) for rows in take(mixture, 5, start_step=2)]
    assert isinstance(with_worker[0], Rows)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # of this process nothing is left blocked


def test_workers_of_prepare_ignore_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.recipe._SMALLEST", 20_000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 200}) + "\n" for i in range(200)))
    make = lambda name, workers: prepared(tmp_path / name, tmp_path / "a.jsonl", align=1, workers=workers, seq_len=T)
    with storm_of_signals() as sent:
        made = make("stormy", 2)
    assert len(set(sent)) >= 2
    assert made.identity == make("calm", 1).identity


def test_a_mixture_has_exact_shares_and_reads_whole_epochs(mixture: RowSource) -> None:
    assert isinstance(mixture, Mixture)
    long, short, _ = mixture._sources
    owner = {key(s[i]): name for name, s in (("long", long), ("short", short)) for i in range(len(s))}
    seen: dict[str, list[bytes]] = {"long": [], "short": [], "stories": []}
    for rows in take(mixture, 40, batch_size=50):
        for k in keys(rows):
            seen[owner.get(k, "stories")].append(k)
    assert [round(len(s) / 2000, 2) for s in seen.values()] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    epochs = mixture.epochs(2000)
    assert list(epochs) == mixture.names[:2]  # the stories never end
    assert list(epochs.values()) == pytest.approx([len(seen["long"]) / len(long), len(seen["short"]) / len(short)], rel=0.05)
    assert epochs[mixture.names[1]] > 20
    for name, count in (("long", len(long)), ("short", len(short))):
        epochs_of = [seen[name][start : start + count] for start in range(0, len(seen[name]) - count, count)]
        assert all(len(set(epoch)) == count for epoch in epochs_of)
        assert len(epochs_of) == len({tuple(epoch) for epoch in epochs_of})


def test_the_length_of_a_mixture_excludes_repeated_rows(mixture: RowSource) -> None:
    assert isinstance(mixture, Mixture)
    long, short, _ = mixture._sources
    assert len(mixture) == min(int(len(long) / 0.5), int(len(short) / 0.3))
    assert key(mixture[5]) == keys(take(mixture, 1)[0])[5]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["a", "b"], ["0", "0"], r"each weight must be at least 1/4096"),
        (["a", "b"], ["1", "0.0001"], r"each weight must be at least 1/4096"),
        (["a", "a"], ["1", "1"], r"--dataset: a was given twice"),
    ],
)
def test_impossible_mixtures_are_refused(stories: StoryRows, names: list[str], weights: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(names, [stories] * len(names), weights, seed=0)


def test_negative_weights_are_refused_with_their_row(text: RowSource) -> None:
    class Unlearns:
        def __getattr__(self, name: str) -> object:
            return getattr(text, name)

        def __len__(self) -> int:
            return len(text)

        def take(self, indices: np.ndarray) -> Rows:
            rows = text.take(indices)
            rows.weights[np.asarray(indices) == 3, 2] = -0.5
            return rows

    with pytest.raises(ConfigError, match=r"numbers\.txt: row 3 has the weight -0\.5 in slot 2"):
        for rows in batches(Unlearns(), batch_size=4, grad_accum=1, seed=0, stop_step=len(text) // 4 + 1):  # type: ignore[arg-type]
            assert (rows.weights >= 0).all()


def test_count_bytes_counts_targets(stories: StoryRows) -> None:
    (rows,) = take(stories, 1)
    real = rows.targets[rows.weights > 0]
    assert count_bytes(rows, BYTES.byte_lengths) == (real < 256).sum() > 0
    empty = Rows(*(np.zeros_like(a) for a in rows))
    assert count_bytes(empty, BYTES.byte_lengths) == 0
