"""Registered file formats."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.documents import files
from nash_mhc.data.documents.files import Files


@pytest.fixture
def no_format_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FORMATS", dict(files.FORMATS))


def _lines(file: BinaryIO) -> Iterator[str | dict[str, Any]]:
    for line in file.read().decode().splitlines():
        yield {"text": line} if line.startswith("{") else line


@pytest.mark.usefixtures("no_format_stays")
def test_registered_format_is_read_also_compressed_and_its_version_changes_the_content(tmp_path: Path) -> None:
    files.register_format(".Lines", _lines)
    (tmp_path / "a.lines").write_text("one\n{two}\n")
    (tmp_path / "b.LINES.gz").write_bytes(gzip.compress(b"three\n"))
    cfg = DataConfig(dataset=str(tmp_path))
    first = Files(cfg.dataset, cfg)
    assert [(raw.file, raw.line, raw.content) for raw in first.read("train")] == [
        (0, 1, "one"),
        (0, 2, "{two}"),
        (1, 1, "three"),
    ]
    files.register_format(".lines", _lines, version="2")
    assert Files(cfg.dataset, cfg).content != first.content


@pytest.mark.usefixtures("no_format_stays")
def test_registered_format_errors_name_the_document(tmp_path: Path) -> None:
    for ending in ("lines", ".a.b", ".jsonl", ".gz", ".py"):
        with pytest.raises(ConfigError, match=r"must be an extension .*\.fasta"):
            files.register_format(ending, _lines)
    files.register_format(".lines", _lines)
    (tmp_path / "a.lines").write_bytes(b"one\n\xff\n")
    cfg = DataConfig(dataset=str(tmp_path / "a.lines"), text_field="body")
    with pytest.raises(ConfigError, match=r"a\.lines: the reader of this format failed at document 1 \(UnicodeDecodeError"):
        list(Files(cfg.dataset, cfg).read("train"))
    (tmp_path / "a.lines").write_text("{two}\n")
    with pytest.raises(ConfigError, match=r"a\.lines:1: no column 'body' .columns: text.; .*--text-field"):
        list(Files(cfg.dataset, cfg).read("train"))
