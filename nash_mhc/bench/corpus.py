"""Build two reproducible text corpora from the source archives of well-known packages.

`python -m nash_mhc.bench corpus --out DIR` downloads fixed versions from pip's package index and writes DIR/code.jsonl
(Python) and DIR/english.jsonl (documentation), one document per line. Results on corpora with the same digest are
comparable.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import io
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nash_mhc.config.commands import OneLineParser, local_path
from nash_mhc.config.schema import ConfigError
from nash_mhc.runtime.compat.pip import default_index

log = logging.getLogger(__name__)

# Large manuals, and code by many authors. Do not change versions: another list is another corpus.
ARCHIVES = tuple(Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").split())
DIGESTS = {
    "code": "d83ce16f9dfd14b07c230159509732dfebc5fc5b9b7e9be05737104afeebf554",
    "english": "6847c4c9fd2ab98722b0197767afd960f270c21754806e205dcebfe61a32f173",
}

_ENDINGS = {".py": "code", ".rst": "english", ".md": "english", ".txt": "english"}
_LEAST, _MOST = 1_000, 1_000_000  # bytes of a document: no stubs, no tables of numbers
# API descriptions in JSON: their directory, and the key that holds prose.
_TEXT_IN = {
    "botocore": ("/botocore/data/", "documentation"),
    "google-api-python-client": ("/discovery_cache/documents/", "description"),
}
_CODE_PER_ARCHIVE = 8_000_000  # most bytes of code from one archive, so that none dominates


def _index() -> str:
    """Return the address of pip's package index."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = os.environ.get("PIP_INDEX_URL") or subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return configured.strip().rstrip("/") or default_index()


def _fetched(archive: str, index: str, cache: Path) -> Path:
    """Download a source archive, once, and check it against the hash in the index."""
    name, _, version = archive.partition("==")
    page = f"{index}/{name}/"
    wanted = rf"(?:.*/)?{re.sub('[-_.]', '[-_.]', name)}-{re.escape(version)}\.tar\.gz(?:#.*)?"
    file = cache / f"{name}-{version}.tar.gz"
    try:
        with urllib.request.urlopen(page, timeout=60) as answer:
            links, base = re.findall(r"""<a\b[^>]*?\bhref\s*=\s*["']([^"']+)""", answer.read().decode()), answer.url
        link = next((link for link in map(html.unescape, links) if re.fullmatch(wanted, link, re.IGNORECASE)), None)
        if link is None:
            raise ConfigError(f"{archive}: {page} has no source archive of this version")
        address, _, digest = urllib.parse.urljoin(base, link).partition("#sha256=")
        if not file.exists():
            with urllib.request.urlopen(address, timeout=300) as answer:
                content = answer.read()
            if digest and hashlib.sha256(content).hexdigest() != digest:
                raise ConfigError(f"{archive}: the download does not match the hash in the index; try again")
            part = file.with_name(file.name + ".partial")
            part.write_bytes(content)
            part.rename(file)
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise ConfigError(f"{archive}: cannot download it from {page}, pip's index ({error})") from None
    return file


def _texts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of an archive's files, sorted by name."""
    place, key = next((place for name, place in _TEXT_IN.items() if file.name.startswith(f"{name}-")), ("", ""))
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
        members = sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name)
        code = 0
        for member in members:
            if place and place in member.name and member.name.endswith(".json"):
                if text := _sentences(json.loads(_read(archive, member)), key):
                    yield "english", text
                continue
            kind = _ENDINGS.get(Path(member.name).suffix)
            if kind is None or not _LEAST <= member.size <= _MOST:
                continue
            if kind == "code":
                if (code := code + member.size) > _CODE_PER_ARCHIVE:
                    continue
            elif not _is_prose(member.name):
                continue
            with contextlib.suppress(UnicodeDecodeError):
                text = _read(archive, member).decode()
                if kind == "code" or sum(c.isalpha() or c == " " for c in text) > 0.7 * len(text):
                    yield kind, text


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = archive.extractfile(member)
    assert content is not None  # it is a file
    return content.read()


def _sentences(value: Any, key: str) -> str:
    """Return the distinct prose strings of an API description, or "" if they are too short."""
    found: dict[str, None] = {}

    def look(value: Any) -> None:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if name == key and isinstance(inner, str):
                found[html.unescape(re.sub(r"<[^>]*>", "", inner)).strip()] = None
            elif isinstance(inner, dict | list):
                look(inner)

    look(value)
    text = "\n\n".join(sentence for sentence in found if " " in sentence)
    return text if len(text.encode()) >= _LEAST else ""


def _is_prose(name: str) -> bool:
    return not re.search(
        r"licen[cs]e|requirements|/tests?/|top_level|SOURCES|\.egg-info|authors|changelog", name, re.IGNORECASE
    )


def build(out: Path, archives: Sequence[str] = ARCHIVES) -> dict[str, tuple[int, int, str]]:
    """Write code.jsonl and english.jsonl to `out`. Return (documents, bytes, digest) of each."""
    cache = out / "archives"
    cache.mkdir(parents=True, exist_ok=True)
    index, seen = _index(), set[bytes]()
    counts, sizes = dict.fromkeys(DIGESTS, 0), dict.fromkeys(DIGESTS, 0)
    digests = {kind: hashlib.sha256() for kind in DIGESTS}
    with tempfile.TemporaryDirectory(dir=out) as partial, contextlib.ExitStack() as stack:
        files = {kind: stack.enter_context(Path(partial, kind).open("w", encoding="utf-8")) for kind in DIGESTS}
        for number, archive in enumerate(archives, 1):
            log.info(f"{number}/{len(archives)} {archive}")
            for kind, text in _texts(_fetched(archive, index, cache)):
                content = text.encode()
                if (known := hashlib.sha256(content).digest()) not in seen:
                    seen.add(known)
                    digests[kind].update(content)
                    counts[kind] += 1
                    sizes[kind] += len(content)
                    files[kind].write(json.dumps({"text": text}) + "\n")
        for kind, file in files.items():
            file.close()
            Path(partial, kind).rename(out / f"{kind}.jsonl")
    return {kind: (counts[kind], sizes[kind], digests[kind].hexdigest()) for kind in DIGESTS}


def command(argv: Sequence[str]) -> int:
    parser = OneLineParser(prog="python -m nash_mhc.bench corpus", allow_abbrev=False, description=str(__doc__).splitlines()[0])
    text = "output directory for code.jsonl and english.jsonl (required)"
    parser.add_argument("--out", type=local_path, metavar="DIR", help=text)
    args = parser.parse_strictly(argv, "name the directory with --out")
    if not args.out:
        raise ConfigError("--out is missing; add a directory, such as --out data/real")
    out = Path(args.out).expanduser()
    try:
        built = build(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); choose another directory") from error
    for kind, (documents, size, digest) in built.items():
        same = "the corpus" if digest == DIGESTS[kind] else "not the corpus"
        text = f"{documents:,} documents, {size / 1e6:.1f} MB, digest {digest[:16]}: {same} of docs/experiments.md"
        print(f"{out / kind}.jsonl: {text}")
    return 0
