"""A seeded fuzzer: small valid files, one of them damaged, read by a command.

Every command must accept the files or end with one line and exit code 2, and leave no file behind that it does not
finish. `python tests/fuzzing.py TARGET SEED` runs one case again and shows it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nash_mhc.config.commands import one_line_errors

_SECONDS = 30  # a case that takes longer has hung
_DEEP = "\N{WHITE SMILING FACE}deep"  # stands for what json.dumps could not write
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"), 2**31, 2**63, 10**20,
    -(10**20), 10**400, "", " ", "x", "x" * 5000, "٣٣", "\uff11\uff12", "020", "\0", "a\x1b[31mb", "\ud800", "\u202eabc",
    "a\nb", "../../../etc/passwd", "/etc/passwd", "s3://b/x", "nan", "null", "true", [], {}, [[]], [None], [""], {"": None},
    {"a": 1}, [1] * 1000, [1.5, "x"], _DEEP,
)  # fmt: skip
YAML_VALUES = (
    "", "~", "null", "[1, 2", "[1, 2]", "{a: b}", "&a [*a]", "*nope", "!!python/object:os.system x", "!!binary xx", "1e400",
    ".nan", "-.inf", "0x7fffffffffffffffffffff", "1_000", "\uff12", "'unclosed", "|", ">", "%", "@x", "\t", "- - - -",
    '"\\ud800"', '"\\0"', "? a", "2001-01-01", "12:30:45", "9" * 30, "9" * 5000, "yes", "x" * 5000, "-1", "[" * 5000,
    "&a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
)  # fmt: skip
JINJA = (
    "{{", "}}", "{%", "{% for m in messages %}", "{% endfor %}", "{{ messages[99].x }}", "{{ 1 / 0 }}", "{% include 'x' %}",
    "{{ ''.__class__.__mro__ }}", "{{ messages | nosuch }}", "{{ raise_exception('no') }}", "{{ strftime_now('%') }}", "{#",
    "{{ messages.append(1) }}", "{{ range(10 ** 9) }}", "{{ undefined.attribute.deeper }}", "{% set x = x %}", "\x00", "\ud7ff",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ '%d' % 'x' }}", "{{ [1][::0] }}", "{% break %}",
)  # fmt: skip
NAMES = (
    "020", "٣٣", "1٣", "99999999999999999999", "-1", "+3", "3.0", " 3", "3 ", "0x3", "3_0", "x" * 250, "\x1b[31m", "a\nb",
    "é", "\uff13", "1e3", "3.damaged", "3.damaged.damaged", "3.orbax-checkpoint-tmp", ".3", "3.saving", "nan",
    "999999999999999", "00",
)  # fmt: skip


# --- damage ---------------------------------------------------------------------------------------------------------


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))

    def flipped() -> bytes:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    ways: list[Callable[[], bytes]] = [
        flipped,
        flipped,
        lambda: data[:at],
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:end] + data[end:],
        lambda: data[:at] + noise + data[at:],
        lambda: data[:at] + rng.choice((b"\0", b"\x1b[2J", b"\x7f", b"\r", b"\xff", b"\xc3", b"\xed\xa0\x80")) + data[at:],
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-7"))),
        lambda: re.sub(rb"\d", lambda found: chr(0x660 + int(found[0])).encode(), data, count=rng.choice((0, 1, 3))),
        lambda: re.sub(rb"\d+", rng.choice((b"9" * 25, b"9" * 5000, b"1e999", b"-1", b"NaN")), data, count=1),
        lambda: data[:at] + b"[" * 100_000 + data[at:],
        lambda: noise * 50,
        lambda: data.replace(b"\n", b"\r\n"),
    ]
    return rng.choice(ways)()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(child, (*path, key))


def _dumped(value: Any) -> str:
    return json.dumps(value).replace(json.dumps(_DEEP), "[" * 100_000 + "]" * 100_000)


def damaged_json(rng: random.Random, data: bytes) -> bytes:
    """Another value, a missing, renamed, unknown or second key; or other bytes."""
    value = json.loads(data)
    if rng.random() < 0.3:
        return damaged_bytes(rng, data)
    path = rng.choice(list(_places(value)))
    if not path:
        return _dumped(rng.choice(VALUES)).encode()
    *parents, last = path
    holder = value
    for key in parents:
        holder = holder[key]
    way = rng.choice(("value", "value", "value", "delete", "rename", "unknown", "twice", "kind"))
    if way == "delete":
        del holder[last]
    elif way == "kind":  # the same, as another type
        holder[last] = rng.choice((str(holder[last]), [holder[last]], {"a": holder[last]}))
    elif way == "rename" and isinstance(holder, dict):
        holder[rng.choice([v for v in VALUES if isinstance(v, str)])] = holder.pop(last)
    elif way == "unknown" and isinstance(holder, dict):
        holder["something_new"] = rng.choice(VALUES)
    elif way == "twice" and isinstance(holder, dict):
        again = f"{json.dumps(last)}: {_dumped(rng.choice(VALUES))}, "
        return _dumped(value).replace(f"{json.dumps(last)}:", again + f"{json.dumps(last)}:", 1).encode()
    else:
        holder[last] = rng.choice(VALUES)
    return _dumped(value).encode()


def damaged_jsonl(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.2:
        return damaged_bytes(rng, data)
    lines = [line for line in data.splitlines(keepends=True) if line.strip()]
    at = rng.randrange(len(lines))
    lines[at] = damaged_json(rng, lines[at]) + b"\n"
    return b"".join(lines)


def damaged_yaml(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return damaged_bytes(rng, data)
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    key, colon, _ = lines[at].partition(":")
    way = rng.random()
    if way < 0.7:
        lines[at] = f"{key}{colon} {rng.choice(YAML_VALUES)}"
    elif way < 0.8:
        lines.insert(at, lines[at])
    else:
        lines[at] = rng.choice(YAML_VALUES) + colon + " 1"
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def damaged_template(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return damaged_bytes(rng, data)
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(JINJA).encode() + data[at:]


def damaged_csv(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return damaged_bytes(rng, data)
    lines = [line.split(",") for line in data.decode().splitlines()]
    line = rng.choice(lines)
    values = ("", '"', "1" * 200_000, "\0", "٣" * 16, "x" * 16, "nan", "#" * 16, "1" * 16, " ", "'", "🙂" * 16, "0" * 15)
    line[rng.randrange(len(line))] = rng.choice(values)
    return "".join(",".join(words) + "\n" for words in lines).encode()


def damaged_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Another header, whose length is right or is not."""
    if rng.random() < 0.2:
        return damaged_bytes(rng, data)
    size = int.from_bytes(data[:8], "little")
    header = damaged_json(rng, data[8 : 8 + size])
    lengths = (len(header),) * 6 + (0, 1, len(header) + 1, len(data), 2**40, 2**64 - 1)
    return rng.choice(lengths).to_bytes(8, "little") + header + data[8 + size :]


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "bytes": damaged_bytes, "json": damaged_json, "jsonl": damaged_jsonl, "yaml": damaged_yaml, "csv": damaged_csv,
    "jinja": damaged_template, "safetensors": damaged_safetensors,
}  # fmt: skip


# --- cases ----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """`make` fills a folder with valid files; one of `files` (glob -> kind of damage) is damaged; `read` reads them.

    What `read` may make or change when it succeeds is named in `makes`.
    """

    make: Callable[[Path], object]
    files: dict[str, str]
    read: Callable[[Path], int]
    makes: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0, 2)
    then: Callable[[Path], object] = lambda folder: None  # done to the damaged files before they are read


def run_main(main: Callable[[], int], *argv: object) -> int:
    """A command in this process, as its console script would run it."""
    before = sys.argv
    sys.argv = ["command", *map(str, argv)]
    try:
        return one_line_errors(main)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before


def refused_or_read(read: Callable[[], object]) -> int:
    """The same for a part of a command that comes before what takes long, such as a compilation."""
    return one_line_errors(lambda: (read(), 0)[1])


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def damage(target: Target, rng: random.Random, folder: Path) -> str:
    pattern = rng.choice(list(target.files))
    path = rng.choice(sorted(folder.glob(pattern)))
    kind = target.files[pattern]
    if kind == "name":
        new = path.with_name(rng.choice(NAMES))
        if rng.random() < 0.5:
            path.rename(new)
        elif path.is_dir():
            shutil.copytree(path, new)
        else:
            shutil.copy(path, new)
        return f"{path.relative_to(folder)} is called {new.name!r}"
    before = path.read_bytes()
    after = DAMAGE[kind](rng, before)
    path.write_bytes(after)
    return f"{path.relative_to(folder)}: {_difference(before, after)}"


def _difference(before: bytes, after: bytes) -> str:
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"{len(before)} -> {len(after)} bytes, from byte {start}: {after[max(0, start - 30) : start + 90]!r}"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Outcome(NamedTuple):
    code: int
    shown: str  # what was damaged, and what the command said
    fault: str | None  # None: as it should be


def run_case(name: str, target: Target, seed: int, valid: Path, scratch: Path) -> Outcome:
    folder = scratch / f"{name}-{seed}".replace(" ", "-")
    shutil.copytree(valid, folder)
    what = damage(target, random.Random(f"{name} {seed}"), folder)
    target.then(folder)
    before = tree(folder)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    fault, code = None, -1
    try:
        with _time_limit(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = target.read(folder)
    except BaseException as error:
        fault = "".join(traceback.format_exception(error)[-4:])
        if isinstance(error, KeyboardInterrupt):
            raise
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    fault = fault or _wrong(target, code, said, before, tree(folder))
    shutil.rmtree(folder)
    return Outcome(code, f"{what}\nexit code {code}\n{said}", fault)


def _wrong(target: Target, code: int, said: str, before: dict[str, str], after: dict[str, str]) -> str | None:
    if code not in target.codes:
        return f"exit code {code}"
    if "Traceback" in said:
        return "a traceback"
    if code == 2 and (not said.splitlines() or not said.splitlines()[-1].startswith("error: ") or said.count("error: ") != 1):
        return f"not one line of error: {said!r}"
    if code == 2 and any(not c.isprintable() for c in said.splitlines()[-1]):
        return "control characters on the terminal"
    changed = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    if code == 0:
        changed = {name for name in changed if not name.startswith(target.makes)} if target.makes else changed
    return f"files changed: {sorted(changed)}" if changed else None


def main() -> None:
    import tempfile

    import conftest  # noqa: F401  (eight devices, as in the suite)
    from fuzz_targets import TARGETS

    name, seed = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as made:
        valid = Path(made) / "valid"
        valid.mkdir()
        TARGETS[name].make(valid)
        outcome = run_case(name, TARGETS[name], seed, valid, Path(made))
    print(outcome.shown, outcome.fault or "as it should be", sep="\n")


if __name__ == "__main__":
    main()
