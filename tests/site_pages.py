"""The documentation site as the tests see it: built once, its links, and the commands of its pages."""

import ast
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
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


# --- messages --------------------------------------------------------------------------------------------------------


def quoted_errors(page: Path) -> Iterator[str]:
    """The lines of its blocks of text that begin with `error: `, without these words."""
    for block in re.findall(r"^```(?:text)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from (line.removeprefix("error: ") for line in block.splitlines() if line.startswith("error: "))


@functools.cache
def messages() -> list[list[str | None]]:
    """Every text in the package, in parts: what is written there, and None for a value."""
    found: list[list[str | None]] = []
    for file in sorted((ROOT / "nash_mhc").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            values = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            found.append([value if isinstance(value, str) else None for value in values])
    return [parts for parts in found if _written(parts) >= 12]


def _written(parts: list[str | None]) -> int:
    return sum(len(part) for part in parts if part)


def is_message(line: str) -> bool:
    """Whether one text of the package makes most of the line, and values are not most of that."""
    for parts in messages():
        if all(part in line for part in parts if part):
            made = re.search("".join(".*" if part is None else re.escape(part) for part in parts), line)
            if made and len(made[0]) >= 0.6 * len(line) and _written(parts) >= 0.2 * len(made[0]):
                return True
    return False


# --- commands --------------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    where: str  # page and line
    text: str  # without its comment
    needs: str | None  # what no test has: hardware, an account, hours. None: a test can run it

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    @property
    def words(self) -> list[str]:
        """Without what stands in brackets for something else: `[the flags of your run]`."""
        return shlex.split(re.sub(r"\[.*?\]", "", self.text))

    @property
    def kind(self) -> str:
        """`train`, `data prepare`, `make test`, `gcloud`: what a test would have to run."""
        words = self.words
        if words[0] == "python":
            words = [words[2].removeprefix("nash_mhc").lstrip(".") or "nash_mhc", *words[3:]]
        elif words[0] == "nash-mhc":
            words = words[1:]
        if words[0] in WITH_COMMANDS or words[0] == "make":
            return " ".join(words[:2])
        own = [word for word in words[1:] if word in OTHER_WORK]
        return " ".join([words[0], *own])

    @property
    def arguments(self) -> list[str]:
        """What comes after the kind's own name."""
        started = 3 if self.words[0] == "python" else 2
        return self.words[started:]


WITH_COMMANDS = ("data", "checkpoint", "bench", "hub", "distill")  # `data prepare`
OTHER_WORK = ("--print-config", "--help", "--live")  # with these, a command does something else
# To the end of the line, or to a quote that another command has opened around it.
_OURS = re.compile(r"""\b(?:python -m (?:nash_mhc|tests)\b|nash-mhc\s|(?<![\w/-])make\s)(?:"[^"]*"|'[^']*'|[^"'])*""")
_THEIRS = re.compile(r"(gcloud|gsutil|kubectl|srun|sbatch|sudo|docker|wandb)\b.*")  # never run by a test
_NEEDS = re.compile(r"<!-- needs: (.+?) -->")


def commands(page: Path) -> list[Command]:
    """Every command in the page's shell blocks (those without a language, and `sh`) that is ours, or no test can run.

    `<!-- needs: a TPU -->` on the line before a block says of all its commands that no test can run them.
    """
    found: list[Command] = []
    for number, needs, line in _shell_lines(page):
        text = re.sub(r"\s#(\s.*)?$", "", line).strip()
        where = f"{page.name}:{number}"
        if theirs := _THEIRS.match(text):
            found.append(Command(where, theirs[0], needs))
        if ours := _OURS.search(text):
            found.append(Command(where, ours[0].strip(), needs))
    return found


def _shell_lines(page: Path) -> Iterator[tuple[int, str | None, str]]:
    """(number, what its block needs, the line with those that it goes on in) of every shell block."""
    language: str | None = None  # of the block that we are in
    needs: str | None = None
    before = ""
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if line.lstrip().startswith("```"):
            marked = _NEEDS.fullmatch(before)
            language, needs = (line.strip()[3:], marked and marked[1]) if language is None else (None, None)
        elif language in ("", "sh"):
            whole = line
            while whole.endswith("\\"):
                whole = whole[:-1] + next(lines)[1].strip()
            yield number, needs, whole
        before = line.strip()
