"""Commands in processes that are forked like training runs: starting an interpreter takes seconds of imports."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import training_process


class CommandProcess:
    """`python WORDS` in a folder; with a variable of the environment that is None, without it."""

    def __init__(self, words: list[str], folder: Path, **env: str | None) -> None:
        self.words = words
        self._out = Path(tempfile.mkdtemp())
        self._process = training_process._server.Process(target=_run_words, args=(words, str(folder), str(self._out), env))
        with training_process._asking:
            self._process.start()

    def end(self) -> subprocess.CompletedProcess[str]:
        self._process.join(training_process._HANGS_S)
        code = self._process.exitcode
        self._process.kill()
        out, err = ((self._out / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._out)
        assert code is not None, f"still there after {training_process._HANGS_S} s:\n{out}{err}"
        return subprocess.CompletedProcess(self.words, code, out, err)


def _run_words(words: list[str], folder: str, out: str, env: dict[str, str | None]) -> None:
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(f"{out}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    for variable, value in env.items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    os.chdir(folder)
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            sys.modules.pop(f"{words[1]}.__main__", None)  # it is to run, not to be found
            if words[1] == "nash_mhc.train":
                from nash_mhc.runtime.signals import SIGNALS

                SIGNALS.listen()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
