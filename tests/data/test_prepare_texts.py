"""Preparing: all kinds of text files, and all tokenizers."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import BYTES, DOCUMENTS, every_byte, prepared, save_tokenizer, stories, texts, write_jsonl

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data import __main__ as command
from nash_mhc.data.documents.files import BLOCK, Files
from nash_mhc.data.pack import split_document
from nash_mhc.data.prepared.folder import PreparedRows, RowFormat
from nash_mhc.data.stories import story
from nash_mhc.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]


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
    assert "5 files, 3 empty documents skipped; not read: 1 without an extension, 1 .png (--extensions)" in manifest.summary()
    chosen = prepared(tmp_path / "chosen", folder, validation_fraction=0.0, extensions="txt,.PNG2,py")
    assert chosen.files == ("a.txt", "code.py")
    with pytest.raises(ConfigError, match=r"no text files in this folder; .*1 \.png.*with --extensions"):
        prepared(tmp_path / "none", folder, extensions=".c")
    with pytest.raises(ConfigError, match=r"--extensions '\*\.py': must be comma-separated file extensions"):
        prepared(tmp_path / "none", folder, extensions="*.py")
    prepared(tmp_path / "globbed", str(folder / "**" / "*.parquet"), validation_fraction=0.0)
    assert texts(tmp_path / "globbed") == ["from a table"]


def test_the_stories_can_be_prepared(tmp_path: Path) -> None:
    prepared(tmp_path / "out", "stories", max_documents=30, seq_len=4096)
    for split in ("train", "validation"):
        assert sorted(texts(tmp_path / "out", split)) == sorted(story(0, split, i).text for i in range(30))
    with pytest.raises(ConfigError, match=r"--dataset stories: is endless; .*--max-documents"):
        prepared(tmp_path / "more", "stories")


def test_max_documents_takes_the_first(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    prepared(tmp_path / "out", tmp_path / "a.jsonl", max_documents=5, validation_fraction=0.0)
    assert sorted(texts(tmp_path / "out")) == sorted(DOCUMENTS[:5])


def test_a_text_larger_than_a_block_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nash_mhc.data.documents.files.BLOCK", 1000)
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
        pieces = split_document(tokens, 0, 8, begin=0 if opens else None, closes=closes)
        targets = [int(t) for p in pieces for t, counts in zip(p.tokens[1:], p.scored, strict=True) if counts]
        assert targets == [*tokens[0 if opens else 1 :], *([0] if closes else [])]
        assert all(len(p.scored) <= 8 and len(p.tokens) == len(p.scored) + 1 for p in pieces)


# --- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "file", "bare file"])
def test_the_tokenizer_is_saved_with_the_rows(tmp_path: Path, form: str) -> None:
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


@pytest.mark.long
def test_a_hugging_face_tokenizer_name_uses_the_local_cache(tmp_path: Path) -> None:
    """The cache is as a download leaves it; there is no network access."""
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
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus_file = write_jsonl(tmp_path_factory.mktemp("corpus") / "stories.jsonl", stories(400))
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
        ([str(tmp_path / "bpe")], r"--out .*bpe: already exists"),
        ([str(tmp_path / "new"), "--vocab-size", "256"], r"--vocab-size must be at least 257"),
    ):
        with pytest.raises(ConfigError, match=message):
            command.train_bpe_command([*flags[1:], *argv])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "bpe"]


def test_a_tokenizer_is_trained_on_all_parts_of_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = []
    for name, word in (("a.txt", "Rhabarber"), ("b.txt", "Zwiebel")):
        (tmp_path / name).write_text(f" {word}" * 50)
        mixture += ["--dataset", f"{tmp_path / name}:0.5"]
    command.train_bpe_command([*mixture, "--vocab-size", "400", "--out", str(tmp_path / "bpe")])
    tokenizer = load_tokenizer(str(tmp_path / "bpe"))
    assert [len(tokenizer.encode(word)) for word in (" Rhabarber", " Zwiebel")] == [1, 1]
    assert " ".join(mixture) in capsys.readouterr().out  # the run that is proposed reads both
    with pytest.raises(ConfigError, match=r"is a mixture; prepare each dataset"):
        command.prepare_command([*mixture, "--out", str(tmp_path / "prepared")])


def test_large_vocabularies_get_wide_tokens() -> None:
    forms = [RowFormat(64, size, 0) for size in (257, 1 << 16, (1 << 16) + 1)]
    assert [f.record["tokens"].base.itemsize for f in forms] == [2, 2, 4]
    assert [f.record.itemsize for f in forms] == [4 + 65 * 2 + 16, 4 + 65 * 2 + 16, 4 + 65 * 4 + 16]
