"""Real text from a package index: a real one, of two small archives, on this machine."""

import functools
import hashlib
import http.server
import io
import json
import tarfile
import threading

import pytest

from nash_mhc.bench import corpus
from nash_mhc.config.schema import ConfigError

PROSE = "A sentence about something that is said in words. " * 40
CODE = "def one() -> int:\n    return 1\n\n" * 60
INTERFACE = {"shapes": {"A": {"documentation": f"<p>{PROSE}</p>"}, "B": {"documentation": "short &amp; sweet"}, "c": ["x"]}}
ARCHIVES = {
    "first-thing==1.0": {"docs/a.rst": PROSE, "lib/b.py": CODE, "lib/tiny.py": "x = 1", "LICENSE.txt": PROSE + "!"},
    "botocore==2.0": {"botocore/data/x/service.json": json.dumps(INTERFACE), "copy.py": CODE, "other.py": CODE + "# 2"},
}


def packed(folder, name, files):
    """A source archive as the index has it, and the link to it."""
    stem = name.replace("==", "-").replace("-thing", "_thing")  # archives spell names in their own way
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{stem}/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    (folder / f"{stem}.tar.gz").write_bytes(made.getvalue())
    return f'<a href="../files/{stem}.tar.gz#sha256={hashlib.sha256(made.getvalue()).hexdigest()}">{stem}.tar.gz</a>'


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that an index is served from."""
    files = tmp_path / "index" / "files"
    files.mkdir(parents=True)
    for name, contents in ARCHIVES.items():
        page = files.parent / name.partition("==")[0]
        page.mkdir()
        (page / "index.html").write_text(packed(files, name, contents))
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(files.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
    yield files.parent
    server.shutdown()
    server.server_close()


def texts(file):
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def test_a_corpus_has_every_text_once_by_its_kind_and_is_the_same_every_time(index, tmp_path):
    made = [corpus.build(tmp_path / name, tuple(ARCHIVES)) for name in ("one", "two")]
    assert texts(tmp_path / "one" / "code.jsonl") == [CODE, CODE + "# 2"]
    told, interface = texts(tmp_path / "one" / "english.jsonl")
    assert told == PROSE
    assert interface == f"{PROSE.strip()}\n\nshort & sweet"
    assert made[0] == made[1]
    assert made[0]["code"][:2] == (2, len(CODE + CODE + "# 2"))
    for kind in ("code", "english"):
        assert (tmp_path / "one" / f"{kind}.jsonl").read_bytes() == (tmp_path / "two" / f"{kind}.jsonl").read_bytes()


def test_what_is_there_is_not_fetched_again(index, tmp_path):
    first = corpus.build(tmp_path / "out", tuple(ARCHIVES))
    for file in (index / "files").iterdir():
        file.unlink()
    assert corpus.build(tmp_path / "out", tuple(ARCHIVES)) == first


@pytest.mark.parametrize(
    ("archive", "damaged", "message"),
    [
        ("first-thing==1.1", False, "first-thing==1.1: .*/first-thing/ has no source archive"),
        ("nobody==1.0", False, "nobody==1.0: .*/nobody/, pip's index"),
        ("botocore==2.0", True, "botocore==2.0: .*hash.*; try again"),
    ],
)
def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing_half_written(index, tmp_path, archive, damaged, message):
    if damaged:
        (index / "files" / "botocore-2.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=message):
        corpus.build(tmp_path / "out", ("first-thing==1.0", archive))
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()] == [
        "archives/first-thing-1.0.tar.gz"
    ]
