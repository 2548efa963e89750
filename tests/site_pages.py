"""The documentation site as the tests see it: built once, and its links."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build(out: Path) -> None:
    """As `make docs` does; a warning is an error (`strict` in mkdocs.yml)."""
    # Without --quiet: mkdocs would not count the warnings that it does not show.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


# --- links -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page of HTML links to, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def broken_links(folder: Path) -> tuple[list[str], int]:
    """(`page: link` for each that leads nowhere, how many there are to other sites, which are not followed)."""
    pages = {file.resolve(): Page(file.read_text()) for file in sorted(folder.rglob("*.html"))}
    broken, elsewhere = [], 0
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                elsewhere += 1
                continue
            # Only the page about pages that are not there has links from the root: it is shown at any place.
            start = folder if file.name == "404.html" else file.parent
            path = parts.path.lstrip("/") if file.name == "404.html" else parts.path
            target = (start / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and target.is_relative_to(folder.resolve())
            place = unquote(parts.fragment)
            if parts.scheme or not there or (place and target in pages and place not in pages[target].ids):
                broken.append(f"{file.relative_to(folder.resolve())}: {link}")
    return broken, elsewhere


def links_of_markdown(page: Path) -> Iterator[str]:
    """The targets of its links and pictures; what stands in code is none."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
