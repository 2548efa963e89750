"""Streams: the same rows after restarts and for any number of processes; every document once per epoch."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import stories, take

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data import streamed_rows
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import open_source
from nash_mhc.data.streamed_rows import Lane, ParquetLanes, StreamRows
from nash_mhc.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
BYTES = ByteTokenizer()
T = 128
TEXTS = stories(240)


@pytest.fixture(autouse=True)
def small_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_rows, "text_of_volume", lambda _: 2000)
    monkeypatch.setattr(streamed_rows, "LEAST_DOCUMENTS", 10)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets  # when a test begins: it takes every worker that only looks for tests seconds

    root: Path = tmp_path_factory.mktemp("streams")
    (root / "parquet").mkdir()
    for number in range(4):
        part = TEXTS[number * 60 : number * 60 + 60]
        pq.write_table(pa.table({"text": part}), root / "parquet" / f"{number}.parquet", row_group_size=15)
    table = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.disable_progress_bars()
    table.save_to_disk(str(root / "saved"), num_shards=8)
    (root / "files").mkdir()
    for number in range(4):
        table.select(range(number * 60, number * 60 + 60)).to_parquet(str(root / "files" / f"train-{number}.parquet"))
    table.select(range(3)).to_parquet(str(root / "files" / "validation-0.parquet"))
    return root


def opened(folders: Path, form: str, cache: Path, split: str = "train", **settings: Any) -> StreamRows:
    dataset = f"hf:{folders / 'files'}" if form == "files" else str(folders / form)
    cfg = DataConfig(**{"dataset": dataset, "seq_len": T, "streaming": True, "cache_dir": str(cache)} | settings)
    source = open_source(cfg, BYTES, split=split, seed=3, align=8)
    assert isinstance(source, StreamRows)
    return source


def keys(rows: Rows) -> list[bytes]:
    return [b"".join(a.reshape(-1, T)[i].tobytes() for a in rows) for i in range(rows.inputs.size // T)]


FORMS = ["parquet", "saved", "files"]


@pytest.mark.parametrize("form", FORMS)
def test_restarts_read_the_same_rows(folders: Path, tmp_path: Path, form: str) -> None:
    whole = [keys(rows) for rows in take(opened(folders, form, tmp_path / "a"), 9, batch_size=64)]
    assert len({k for step in whole for k in step}) > 0.95 * len(whole) * 64  # hardly a lane has come to its end
    for start in range(1, 9):
        (known,) = take(opened(folders, form, tmp_path / "a"), 1, batch_size=64, start_step=start)
        assert keys(known) == whole[start]
    # On another machine there is no index: the lanes are read again, to the same rows.
    # A damaged one is not trusted either.
    for cache, start in ((tmp_path / "b", 5), (tmp_path / "c", 8)):
        if start == 8:
            opened(folders, form, cache)[200]
            for file in cache.glob("*/*.jsonl"):  # two processes have written it, and one was killed
                file.write_text(file.read_text() * 2)
                file.write_text(file.read_text()[:-9])
        rest = take(opened(folders, form, cache), 9 - start, batch_size=64, start_step=start)
        assert [keys(rows) for rows in rest] == whole[start:]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_processes_read_their_own_lanes_only(folders: Path, tmp_path: Path, form: str, processes: int) -> None:
    whole = [keys(rows) for rows in take(opened(folders, form, tmp_path / "a"), 4, batch_size=32)]
    for rank in range(processes):
        source = opened(folders, form, tmp_path / f"p{rank}")
        mine = take(source, 4, batch_size=32, share=(rank, processes))
        assert [keys(rows) for rows in mine] == [step[rank::processes] for step in whole]
        read = {number for number, lane in enumerate(source.lanes) if len(lane.ends) > 1}
        assert read == set(range(rank, source.count, processes))


@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_holds_every_document_once(folders: Path, tmp_path: Path, form: str) -> None:
    source = opened(folders, form, tmp_path / "cache", validation_fraction=0.1)
    found: list[Counter[bytes]] = []
    for number in range(source.count):
        lane, tokens = source.lanes[number], Counter[bytes]()
        for row in itertools.count():
            rows = source[row * source.count + number]
            volume = next(v for v in range(len(lane.ends)) if lane.ends[v + 1] > row)
            if lane.states[volume][0] > 0:  # the next epoch of this lane has begun
                break
            for s in range(1, rows.segments.max() + 1):
                part = rows.targets[(rows.segments == s) & (rows.weights > 0)]
                tokens.update(part.astype(np.uint16).tobytes()[i : i + 2] for i in range(0, 2 * len(part), 2))
        found.append(tokens)
    train = sum(found, Counter())
    assert source._recipe["validation_fraction"] == (0 if form == "files" else 0.1)
    end = np.uint16(BYTES.end).tobytes()
    every = Counter(bytes([byte, 0]) for byte in "".join(TEXTS).encode())
    ends = train.pop(end)
    if form == "files":  # it has a validation split of its own: all of train is trained on
        assert train == every
        assert ends == len(TEXTS)
    else:
        assert 0.03 < 1 - ends / len(TEXTS) < 0.2
        assert not train - every


@pytest.mark.parametrize("form", FORMS)
def test_held_out_documents_are_never_trained_on(folders: Path, tmp_path: Path, form: str) -> None:
    train, held = (
        opened(folders, form, tmp_path / "cache", split, validation_fraction=0.2) for split in ("train", "validation")
    )
    texts = []
    for source, count in ((train, 900), (held, 100)):
        rows = source.take(list(range(count)))
        first = {BYTES.decode(rows.targets[i][rows.segments[i] == s])[:60] for i in range(count) for s in range(1, 4)}
        texts.append({t for t in first if t.startswith(("Once", "Long ago", "Last year", "In old"))})
    assert len(texts[0]) > 100
    assert len(texts[1]) > 2
    if form != "files":  # its validation split repeats documents of train, on purpose
        assert not texts[0] & texts[1]


def test_a_truncated_index_is_completed(folders: Path, tmp_path: Path) -> None:
    opened(folders, "parquet", tmp_path / "cache").take(list(range(300)))
    files = sorted(tmp_path.glob("cache/*/*.jsonl"))
    whole = [len(Lane(file).ends) for file in files]
    assert min(whole) > 2
    for file in files:
        file.write_text(file.read_text()[:-9])
    assert [len(Lane(file).ends) for file in files] == [count - 1 for count in whole]
    opened(folders, "parquet", tmp_path / "cache").take(list(range(300)))
    assert [len(Lane(file).ends) for file in files] == whole


def test_small_data_has_few_lanes(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane has training data, and all finish an epoch at about the same time."""
    monkeypatch.setattr(streamed_rows, "LEAST_DOCUMENTS", 1000)
    for form in ("parquet", "saved"):
        for split in ("train", "validation"):
            source = opened(folders, form, tmp_path / "cache", split)
            assert source.count == 1
            assert source[3].weights.sum() > 50


def test_streams_continue_with_further_epochs(folders: Path, tmp_path: Path) -> None:
    source = opened(folders, "parquet", tmp_path / "cache")
    far = source[source.count * 200]  # each lane has some 60 rows
    assert max(state[0] for state in source.lanes[0].states) >= 2
    assert keys(far) == keys(opened(folders, "parquet", tmp_path / "other")[source.count * 200])


def test_volumes_are_shuffled_and_lanes_do_not_end_together(folders: Path, tmp_path: Path) -> None:
    source = opened(folders, "parquet", tmp_path / "cache")
    source.take(list(range(source.count * 20)))
    assert len({lane.ends[1] for lane in source.lanes}) > 2
    orders = [lane.volumes[1][1].tolist() for lane in source.lanes if 1 in lane.volumes]
    assert any(order != sorted(order) for order in orders)


def test_unsupported_streams_are_refused(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dataset": str(tmp_path / "a.txt")}, r"a\.txt: --streaming reads only Parquet and Hugging Face data"),
        ({"num_workers": 2}, r"--streaming .*; leave out --num-workers"),
        ({"max_documents": 2}, r"--streaming reads all of the data; leave out --max-documents"),
        ({"text_field": "body"}, r"0\.parquet:1: no column 'body' .columns: text.; .*--text-field"),
        (
            {"validation_fraction": 0.0, "eval_split": "test"},
            r"no split .test. and no held-out documents; raise --validation-fraction",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            split = "test" if "eval_split" in settings else "train"
            opened(folders, "parquet", tmp_path / "cache", split, **settings)[0]
    assert ParquetLanes(str(folders / "parquet"), DataConfig()).lanes_of("train") == 16
