"""Preparing: every source and tokenizer, the same bytes whoever made them and however often they were killed,
no waste."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import BYTES, DOCUMENTS, prepared, save_tokenizer, stories, texts, write_jsonl

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data import __main__ as command
from nash_mhc.data.documents.readers import BLOCK, Files
from nash_mhc.data.pack import cut, positions
from nash_mhc.data.prepared import prepare as prepare_module
from nash_mhc.data.prepared import rows as rows_module
from nash_mhc.data.prepared.rows import PreparedRows, RowFormat
from nash_mhc.data.stories.corpus import StoryCorpus
from nash_mhc.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent


def every_byte(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- sources ---------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, documents: list[str | None], field: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(len(documents))), field: documents}), path, row_group_size=7)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_document_of_a_file_comes_back_once(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_jsonl
    write(tmp_path / name, DOCUMENTS, "body")  # type: ignore[arg-type]
    manifest = prepared(tmp_path / "out", tmp_path / name, text_field="body")
    assert Counter(texts(tmp_path / "out") + texts(tmp_path / "out", "validation")) == Counter(DOCUMENTS)
    assert manifest.bytes == sum(len(d.encode()) for d in DOCUMENTS)
    assert sum(s.documents for s in manifest.splits.values()) == len(DOCUMENTS)
    assert manifest.splits["validation"].documents == 2  # a twentieth of 42


def test_a_folder_and_a_glob_hold_files_of_any_kind(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    write_jsonl(folder / "b.jsonl.zst", ["from a zst"])
    write_parquet(folder / "deep" / "c.parquet", ["from a table", None, ""])
    (folder / "a.txt").write_text("from a text")
    (folder / "empty.md").write_text("")
    (folder / "code.py").write_text("print()")
    (folder / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (folder / "Makefile").write_text("all:")
    (folder / ".hidden.txt").write_text("not meant")
    manifest = prepared(tmp_path / "out", folder, validation_fraction=0.0)
    assert sorted(texts(tmp_path / "out")) == ["from a table", "from a text", "from a zst", "print()"]
    assert manifest.empty == 3
    assert manifest.files == ("a.txt", "b.jsonl.zst", "code.py", "deep/c.parquet", "empty.md")
    assert "5 files, 3 empty documents left out; not read: 1 without an ending, 1 .png (--extensions)" in manifest.summary()
    chosen = prepared(tmp_path / "chosen", folder, validation_fraction=0.0, extensions="txt,.PNG2,py")
    assert chosen.files == ("a.txt", "code.py")
    with pytest.raises(ConfigError, match=r"no file with text in this folder; there are .*1 \.png.*with --extensions"):
        prepared(tmp_path / "none", folder, extensions=".c")
    with pytest.raises(ConfigError, match=r"--extensions '\*\.py': must be the endings of files"):
        prepared(tmp_path / "none", folder, extensions="*.py")
    prepared(tmp_path / "globbed", str(folder / "**" / "*.parquet"), validation_fraction=0.0)
    assert texts(tmp_path / "globbed") == ["from a table"]


def test_the_stories_can_be_prepared(tmp_path: Path) -> None:
    prepared(tmp_path / "out", "stories", max_documents=30, seq_len=4096)
    corpus = StoryCorpus()
    for split in ("train", "validation"):
        assert sorted(texts(tmp_path / "out", split)) == sorted(corpus.story(0, split, i).text for i in range(30))
    with pytest.raises(ConfigError, match=r"no end to them; say how many to prepare with --max-documents"):
        prepared(tmp_path / "more", "stories")


def test_max_documents_takes_the_first(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl", max_documents=5, validation_fraction=0.0)
    assert sorted(texts(tmp_path / "out")) == sorted(DOCUMENTS[:5])


def test_a_text_larger_than_a_block_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.documents.readers.BLOCK", 1000)
    assert BLOCK > 10**6
    lines = "".join(f"line {i}: é東🙂\n" for i in range(200))
    for name, text in {"lines": lines, "none": "é東🙂" * 700, "exact": "x" * 1000, "twice": "y" * 2000}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        raws = list(Files(str(tmp_path / f"{name}.txt"), DataConfig()).read("train"))
        assert b"".join(raw.content for raw in raws).decode() == text
        assert [raw.opens for raw in raws] == [True] + [False] * (len(raws) - 1)
        assert [raw.closes for raw in raws] == [False] * (len(raws) - 1) + [True]
        assert all(raw.content.decode("utf-8") for raw in raws)  # no character is cut
        assert name == "exact" or len(raws) > 1
        assert raws[-1].line == 1 + sum(raw.content.count(b"\n") for raw in raws[:-1])
        prepared(tmp_path / name, tmp_path / f"{name}.txt", validation_fraction=0.0, seq_len=64)
        # Each token but the first of a later block is predicted, and one end.
        rows = PreparedRows(tmp_path / name, "train")
        scored = sum(rows[i].weights.sum() for i in range(len(rows)))
        assert scored == len(text.encode()) + 1 - (len(raws) - 1)
        assert sum((rows[i].targets[rows[i].weights > 0] == BYTES.end).sum() for i in range(len(rows))) == 1


def test_pieces_of_an_open_document_predict_every_token_after_their_first() -> None:
    for opens, closes, length in [
        (True, False, 5),
        (False, False, 17),
        (False, True, 16),
        (True, False, 15),
        (False, False, 1),
    ]:
        tokens = np.arange(1, length + 1)
        pieces = cut(tokens, 0, 8, opens=opens, closes=closes)
        targets = [int(t) for p in pieces for t, counts in zip(p.tokens[1:], p.counts, strict=True) if counts]
        assert targets == [*tokens[0 if opens else 1 :], *([0] if closes else [])]
        assert all(len(p.counts) <= 8 and len(p.tokens) == len(p.counts) + 1 for p in pieces)


def test_positions_count_from_the_start_of_each_document() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    assert positions(segments).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "file", "bare file"])
def test_a_tokenizer_by_folder_or_file_goes_with_the_rows(tmp_path: Path, form: str) -> None:
    folder = Path(save_tokenizer(tmp_path / "tokenizer"))
    if form == "bare file":
        (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(str(folder if form == "folder" else folder / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    manifest = prepared(tmp_path / "out", tmp_path / "a.jsonl", tokenizer, validation_fraction=0.0)
    assert Counter(texts(tmp_path / "out", tokenizer=tokenizer)) == Counter(DOCUMENTS)
    assert manifest.recipe["tokenizer"]["vocab_size"] == tokenizer.vocab_size == 271
    again = load_tokenizer(str(tmp_path / "out" / "tokenizer"))
    assert again.end == tokenizer.end
    assert texts(tmp_path / "out", tokenizer=again) == texts(tmp_path / "out", tokenizer=tokenizer)


def test_a_tokenizer_by_its_name_on_hugging_face_comes_from_the_local_cache(tmp_path: Path) -> None:
    """As a download would have left it: no network is asked."""
    snapshot = tmp_path / "hub" / "models--someone--cats" / "snapshots" / ("0" * 40)
    save_tokenizer(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    # A folder of ours is read by the class that AutoTokenizer would choose, without it: it imports torch.
    plain = save_tokenizer(tmp_path / "plain")
    code = f"""
import sys
from nash_mhc.data.tokenizer import load_tokenizer
plain = load_tokenizer({plain!r})
print("torch" in sys.modules, load_tokenizer("someone/cats").vocab_size, load_tokenizer("hf:someone/cats").end)
from transformers import AutoTokenizer
print(type(plain._inner) is type(AutoTokenizer.from_pretrained({plain!r})))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "False 271 0\nTrue\n", done.stderr


def test_a_tokenizer_can_be_trained(
    tmp_path: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["train-bpe", "--dataset", str(corpus_file), "--max-documents", "300", "--vocab-size", "500", "--out"]
    for name in ("bpe", "again"):
        monkeypatch.setattr(sys, "argv", ["data", *flags, str(tmp_path / name)])
        assert command.main() == 0
    wanted = f"-m nash_mhc.train --dataset {corpus_file} --max-documents 300 --tokenizer {tmp_path / 'again'}\n"
    assert capsys.readouterr().out.endswith(wanted)
    assert every_byte(tmp_path / "bpe") == every_byte(tmp_path / "again")
    tokenizer = load_tokenizer(str(tmp_path / "bpe"))
    assert (tokenizer.vocab_size, tokenizer.end) == (500, 0)
    for text in (stories(1)[0], "naïve café, 東京, 🙂 and a tab\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert len(tokenizer.encode(stories(1)[0])) < 0.5 * len(stories(1)[0])
    for argv, message in (
        ([str(tmp_path / "bpe")], r"bpe: is there already; choose another folder"),
        ([str(tmp_path / "new"), "--vocab-size", "256"], r"--vocab-size must be at least 257"),
    ):
        with pytest.raises(ConfigError, match=message):
            command.train_bpe_command([*flags[1:], *argv])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "bpe"]


def test_a_tokenizer_of_a_mixture_knows_the_words_of_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = []
    for name, word in (("a.txt", "Rhabarber"), ("b.txt", "Zwiebel")):
        (tmp_path / name).write_text(f" {word}" * 50)
        mixture += ["--dataset", f"{tmp_path / name}:0.5"]
    command.train_bpe_command([*mixture, "--vocab-size", "400", "--out", str(tmp_path / "bpe")])
    tokenizer = load_tokenizer(str(tmp_path / "bpe"))
    assert [len(tokenizer.encode(word)) for word in (" Rhabarber", " Zwiebel")] == [1, 1]
    assert " ".join(mixture) in capsys.readouterr().out  # the run that is proposed reads both
    with pytest.raises(ConfigError, match=r"is a mixture; prepare its parts, each by itself"):
        command.prepare_command([*mixture, "--out", str(tmp_path / "prepared")])


def test_large_vocabularies_get_wide_tokens() -> None:
    forms = [RowFormat(64, size, 0) for size in (257, 1 << 16, (1 << 16) + 1)]
    assert [f.dtype.itemsize for f in forms] == [2, 2, 4]
    assert [f.record_bytes for f in forms] == [4 + 65 * 2 + 16, 4 + 65 * 2 + 16, 4 + 65 * 4 + 16]


# --- the same bytes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 900 kB of stories: nine chunks, where a chunk is as small as these tests make it."""
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
def test_killed_and_resumed_and_in_parallel_are_the_same_bytes(tmp_path: Path, corpus_file: Path) -> None:
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
def test_leftovers_of_other_settings_are_not_taken_over(tmp_path: Path, corpus_file: Path, monkeypatch: Any) -> None:
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
def test_several_that_want_the_same_data_prepare_it_once(tmp_path: Path, corpus_file: Path, monkeypatch: Any) -> None:
    """As the processes of one run on one machine do."""
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
    with pytest.raises(ConfigError, match=r"holds other data \(seq_len 256 there, 128 now\); choose another --out"):
        prepared(tmp_path / "out", tmp_path / "a.jsonl", seq_len=128)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match=r"taken: is there already and holds no prepared data"):
        prepared(tmp_path / "taken", tmp_path / "a.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "taken"]


# --- packing
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "align"), [(2048, 16), (4096, 16)])
def test_little_is_padding(tmp_path: Path, corpus_file: Path, seq_len: int, align: int) -> None:
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


def test_a_changed_cut_or_missing_shard_is_found_at_open_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    file = tmp_path / "out" / "train-00000.rows"
    good = file.read_bytes()
    for at in (0, len(good) // 2, len(good) - 1):
        flipped = bytearray(good)
        flipped[at] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"train-00000\.rows: its content has changed since it was prepared"):
            PreparedRows(tmp_path / "out", "train")
    file.write_bytes(good[:-1])
    with pytest.raises(ConfigError, match=r"train-00000\.rows: has [\d,]+ bytes instead of [\d,]+"):
        PreparedRows(tmp_path / "out", "train")
    PreparedRows(tmp_path / "out", "validation")  # the other split is whole
    file.unlink()
    with pytest.raises(ConfigError, match=r"train-00000\.rows: is missing"):
        PreparedRows(tmp_path / "out", "train")
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json: damaged"):
        PreparedRows(tmp_path / "out", "train")


def test_a_token_outside_the_vocabulary_is_found_by_file_and_row(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl")
    rows = PreparedRows(tmp_path / "out", "train", vocab_size=200)
    bad = next(i for i in range(len(rows)) if PreparedRows(tmp_path / "out", "train")[i].inputs.max() >= 200)
    with pytest.raises(ConfigError, match=rf"row {bad} of its prepared train-00000\.rows: token \d+ is outside the voc"):
        rows.take([bad])


def test_threads_that_open_the_same_shards_do_not_close_them_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        rows._open = rows_module.few_open_files(rows._paths, at_once=2)
        with ThreadPoolExecutor(8) as pool:
            for got in pool.map(lambda _, rows=rows: rows.take(np.arange(len(rows))).inputs, range(8)):
                np.testing.assert_array_equal(got, wanted)
