"""Unusable data is reported in one line with file, line and remedy; exit code 2, no files left."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_process import CommandProcess
from corpora import save_tokenizer

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.sources import open_source
from nash_mhc.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
GOOD = json.dumps({"text": "a good line"}) + "\n"


def lines(*parts: str) -> Callable[[Path], object]:
    return lambda path: path.write_text("".join(parts))


def table(**columns: list[object]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


def raw(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


CASES = {
    "not UTF-8 text": ("a.txt", raw(b"good\ncaf\xe9 x"), {}, r"a\.txt:2: not UTF-8 at byte 3 of the line; convert the file"),
    "cut character": ("a.txt", raw("🙂".encode()[:3]), {}, r"a\.txt:1: not UTF-8 at byte 0 of the line"),
    "not UTF-8 line": ("a.jsonl", raw(GOOD.encode() + b'{"text": "\xff"}\n'), {}, r"a\.jsonl:2: not UTF-8 at byte 10"),
    "broken JSON": ("a.jsonl", lines(GOOD, GOOD, '{"text": "x"\n'), {}, r"a\.jsonl:3: not valid JSON \(.+\); a line must hold"),
    "an array": ("a.json", lines("[\n", GOOD, "]\n"), {}, r"a\.json:1: not valid JSON"),
    "a number": ("a.jsonl", lines(GOOD, "7\n"), {}, r"a\.jsonl:2: not a JSON object, but a value of type int"),
    "missing field": (
        "a.jsonl", lines(GOOD, '{"txt": "x", "id": 1}\n'), {},
        r"a\.jsonl:2: no field 'text' .fields: txt, id.; .*--text-field",
    ),
    "text that is none": ("a.jsonl", lines('{"text": 7}\n'), {}, r"a\.jsonl:1: text is of type int, not text; choose"),
    "half a character": ("a.jsonl", lines(r'{"text": "\ud800"}', "\n"), {}, r"a\.jsonl:1: text .*surrogate"),
    "missing column": (
        "a.parquet", table(body=["x"], id=[1]), {}, r"a\.parquet:1: no column 'text' .columns: body, id.; .*--text-field"
    ),
    "column of numbers": ("a.parquet", table(text=[1]), {}, r"a\.parquet:1: text is of type int, not text"),
    "no parquet": ("a.parquet", raw(b"PAR1 nothing"), {}, r"a\.parquet: .*Parquet file \(.+\);"),
    "cut gzip": ("a.jsonl.gz", raw(gzip.compress(GOOD.encode() * 99)[:-20]), {}, r"a\.jsonl\.gz: cannot be read \(Trunc"),
    "no zstd": ("a.jsonl.zst", raw(b"hello hello"), {}, r"a\.jsonl\.zst: cannot be read \(ZSTD decompress failed"),
    "empty file": ("a.txt", raw(b""), {}, r"a\.txt: .*no document with text"),
    "no document": ("a.jsonl", lines('{"text": ""}\n', "\n"), {}, r"a\.jsonl: .*no document with text"),
    "blank lines": ("a.jsonl", lines("\n", "\n"), {}, r"a\.jsonl: .*no document with text"),
    "empty folder": ("a", lambda path: path.mkdir(), {}, r"a: no text files in this folder;"),
    "folder with a file's name": ("a", lambda path: (path / "b.txt").mkdir(parents=True), {}, r"a: no text files in this"),
    "no variant": ("a.txt", lines("x"), {"dataset_name": "v2"}, r"--dataset-name v2: .*a\.txt has no subsets; leave it out"),
    "template": (
        "a.jsonl", lines('{"prompt": "x", "response": "y"}\n'), {"format": "prompt", "template": "{rôle}: {content}"},
        r"--template '\{rôle\}: \{content\}': .*\{content\} once .*\{role\}",
    ),
    "no response": ("a.jsonl", lines('{"prompt": "x"}\n'), {"format": "prompt"}, r"a\.jsonl:1: no field 'response'"),
    "no messages": ("a.jsonl", lines('{"messages": []}\n'), {"format": "chat"}, r"a\.jsonl:1: messages must be .*list"),
    "no answer": (
        "a.jsonl", lines('{"messages": [{"role": "user", "content": "x"}]}\n'), {"format": "chat"},
        r"a\.jsonl:1: no message of role assistant.*--loss-on all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_reported_with_file_and_line_and_leaves_no_files(tmp_path: Path, name: str) -> None:
    file, write, settings, message = CASES[name]
    write(tmp_path / file)
    cfg = DataConfig(dataset=str(tmp_path / file), cache_dir=str(tmp_path / "cache"), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message) as caught:
        open_source(cfg, ByteTokenizer(), split="train", seed=0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def command(folder: Path, module: str, *argv: str) -> str:
    """Run a command in `folder`; return its only line on stderr, with exit code 2."""
    done = CommandProcess(["-m", module, *argv], folder).end()
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_command_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for i in range(9):
        (tmp_path / "notes" / f"{i}.txt").write_text(f"note {i} " * 99)
    before = sorted(tmp_path.rglob("*"))
    prepare = ("nash_mhc.data", "prepare")
    assert "unknown command 'prepar'; did you mean prepare?" in command(tmp_path, "nash_mhc.data", "prepar")
    assert "unknown flag --text-feld; did you mean --text-field?" in command(tmp_path, *prepare, "--text-feld", "x")
    assert "--out is missing" in command(tmp_path, *prepare, "--dataset", "notes")
    missing = command(tmp_path, *prepare, "--dataset", "note", "--out", "out")
    assert "--dataset note: neither 'stories' nor" in missing
    (tmp_path / "notes" / "7.txt").write_bytes(b"x\n\xff")
    assert "notes/7.txt:2: not UTF-8" in command(tmp_path, *prepare, "--dataset", "notes", "--out", "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_prepared_rows_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    """Another tokenizer, length or alignment, and a tokenizer that is larger than the model."""
    folder = save_tokenizer(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 400)
    argv = ["-m", "nash_mhc.data", "prepare", "--dataset", "a.txt", "--tokenizer", folder, "--out", "out", "--seq-len", "64"]
    done = CommandProcess(argv, tmp_path).end()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("-m nash_mhc.train --dataset out\n")
    refusal = command(tmp_path, "nash_mhc.train", "--dataset", "out", "--model-vocab-size", "257")
    assert "--tokenizer out/tokenizer has 271 tokens, but the model has only 257; set --model-vocab-size 271" in refusal
    assert done.stderr == ""
    from nash_mhc.config import presets
    from nash_mhc.data.tokenizer import load_tokenizer
    from nash_mhc.train import run

    def refused(tokenizer: str, **settings: object) -> str:
        cfg = presets.run()
        data = {"dataset": str(tmp_path / "out"), "tokenizer": tokenizer, "seq_len": 64}
        plain = {"scales": 2, "residual": "plain", "conv_taps": 0}  # quick to trace
        model = {"vocab_size": 271} | plain | {k: settings.pop(k) for k in ("vocab_size", "ratio", "window") if k in settings}
        cfg = cfg.from_dict(
            cfg.to_dict() | {"data": cfg.to_dict()["data"] | data | settings, "model": cfg.to_dict()["model"] | model}
        )
        with pytest.raises(ConfigError) as caught:
            run(cfg, quiet=True)
        return str(caught.value)

    own = str(tmp_path / "out" / "tokenizer")
    assert load_tokenizer(own).vocab_size == 271
    assert "has 271 tokens, but the model has only 257; set --model-vocab-size 271" in refused(own, vocab_size=257)
    assert f"was not prepared with --tokenizer bytes; use --tokenizer {own}" in refused("bytes")
    assert "sequence length 64, but this run uses 128; use --seq-len 64" in refused(own, seq_len=128)
    aligned = refused(own, ratio=64, window=None)
    assert (
        "documents start at multiples of 16, this model needs 64; prepare the data again with the run's --model-size" in aligned
    )
