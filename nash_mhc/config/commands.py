"""Helpers of every command: one-line errors, did-you-mean hints, exit codes, printed commands."""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from nash_mhc import __version__
from nash_mhc.config import logs
from nash_mhc.config.fields import ConfigError, check_scheme


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean X?` for the valid name closest to `word`, or an empty text."""
    by_core = {name.lstrip("-"): name for name in valid}  # leading dashes make all short flags look alike
    near = difflib.get_close_matches(word.lower().lstrip("-"), by_core, n=1)
    return f"; did you mean {by_core[near[0]]}?" if near else ""


def name_hint(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean X?`, or `; choose from X, Y` if no name is close."""
    valid = list(valid)
    return did_you_mean(word, valid) or f"; choose from {', '.join(valid)}"


def local_path(text: str) -> str:
    """argparse type: a local file or folder."""
    return _path(text, remote=False)


def run_path(text: str) -> str:
    """argparse type: a run directory, local or gs://."""
    return _path(text, remote=True)


def _path(text: str, *, remote: bool) -> str:
    try:
        check_scheme("", text, remote=remote)
    except ConfigError as error:  # argparse adds the flag's name
        raise argparse.ArgumentTypeError(str(error).lstrip()) from None
    return text


class OneLineParser(argparse.ArgumentParser):
    """argparse that raises one-line ConfigErrors and suggests the nearest known flag."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    def dashed(self, argv: Sequence[str]) -> list[str]:
        """Rewrite --max_tokens as --max-tokens if there is such a flag."""
        known = {name for action in self._actions for name in action.option_strings}
        words = []
        for word in argv:
            flag, equals, value = word.partition("=")
            words.append(flag.replace("_", "-") + equals + value if flag.replace("_", "-") in known else word)
        return words

    def parse_strictly(self, argv: Sequence[str], stray: str) -> argparse.Namespace:
        """Like parse_args; `stray` is the remedy for an unexpected argument, with {word!r} as its placeholder."""
        args, rest = self.parse_known_args(self.dashed(argv))
        if rest:
            word = rest[0].partition("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"unexpected argument {word!r}; {stray.format(word=word)}")
            flags = [name for action in self._actions for name in action.option_strings]
            raise ConfigError(f"unknown flag {word}{did_you_mean(word, flags) or '; --help lists them all'}")
        return args


def chosen_command(about: Mapping[str, str], usage: str, kind: str = "command") -> tuple[str, list[str]] | None:
    """Return (command, its arguments) from sys.argv, or None after printing the help."""
    command, *argv = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print(f"usage: {usage}\n", *(f"  {name:<12}  {text}" for name, text in about.items()), sep="\n")
        print(f"\nTo list the flags of a {kind}, add --help after its name.")
        return None
    if command not in about:
        raise ConfigError(f"unknown {kind} {command!r}{did_you_mean(command, about)}; usage: {usage}")
    return command, argv


def this_python() -> str:
    """Return the shell command for the running Python interpreter, relative to the current directory if possible."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        return str(python.relative_to(Path.cwd()))
    return "python" if shutil.which("python") == str(python) else str(python)


def module_command(module: str, *words: str) -> str:
    """Return a shell command that runs a module of this package from the current directory."""
    return shlex.join([this_python(), "-m", module, *words])


def resume_command(folder: object, *flags: str) -> str:
    """Return the command that resumes the run in this folder."""
    name = str(folder)
    # Without a slash, the parser takes a word for a folder only if it exists.
    return module_command("nash_mhc.train", name if "/" in name else f"./{name}", *flags)


def printable(text: str) -> str:
    """Return the text as one line of limited length, with control characters escaped: it may quote a file."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return line if len(line) <= 4000 else f"{line[:3000]} ... {line[-900:]}"


def one_line_errors(main: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 and one line on stderr for a user's mistake, 130 for Ctrl-C."""
    logs.configure("info")  # until `main` has parsed --log-level
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"nash_mhc {__version__}, jax {version('jax')}, Python {platform.python_version()}")
            return 0
        return main()
    except ConfigError as error:
        print("error: " + printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`head`, a pager) has closed the pipe; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def file_to_write(flag: str, name: str | None) -> Path | None:
    """Return the file named by a flag, or None.

    Raise ConfigError if it cannot be written: checked before hours of work.
    """
    file = Path(name).expanduser() if name else None
    if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise ConfigError(f"{flag} {file}: cannot be written; name a file in an existing folder")
    return file
