"""`--profile 50:55`: an XProf trace of those steps, and what they were spent on, by the names of the model's parts."""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata=\{[^}]*op_name=\"([^\"]+)\"", re.MULTILINE)
# What JAX puts between and around the names that the code gives: calls and loops, differentiation.
_NOT_NAMES = re.compile(
    r"p?jit\(.*|eval_jaxpr|while|body|cond|branch\w*|closed_call|checkpoint|remat\w*|custom_\w+|scan|.*->.*"
)
_GRAPHS = "xla_gpu_enable_command_buffer"  # what is to be recorded; empty: nothing
SHOWN = 10


def disable_command_buffers() -> None:
    """Before JAX has looked for devices, of which a GPU would record steps as graphs: what is in those has no names."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _GRAPHS not in flags and Path("/dev/nvidiactl").exists():
        os.environ["XLA_FLAGS"] = f"{flags} --{_GRAPHS}=".strip()


class Profile:
    """Of steps `first` to `last`, into `folder`.

    `program` gives the text of the compiled step, which knows whose each instruction is.
    """

    def __init__(self, first: int, last: int, folder: Path, program: Callable[[], str], say: Callable[[str], None]) -> None:
        self.first, self.last = first, last
        self._folder, self._program, self._say = folder, program, say
        self._running = False

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """A trace that cannot be begun, written or read is no reason to end a run."""
        try:
            yield
        except Exception as error:  # of the profiler, of the disk, of a trace that is not as we know it
            self._running = False
            self._say(f"no profile: {type(error).__name__}: {' '.join(str(error).split())[:200]}; training goes on")

    def before(self, step: int, state: Any) -> float:
        """The step is about to be dispatched, on this state, which is waited for: the step that makes it is none of
        these. Returns the seconds that beginning took."""
        if step != self.first:
            return 0.0
        jax.block_until_ready(state)
        began = time.perf_counter()
        with self._harmless():
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        return time.perf_counter() - began

    def after(self, step: int, state: Any) -> float:
        """It has been, and will return this. The last one is waited for, so that all of it is in the trace; then, for
        so many seconds, the trace is written and read."""
        if not (self._running and step == self.last):
            return 0.0
        jax.block_until_ready(state)
        began = time.perf_counter()
        with self._harmless():
            self._stop()
            self._report()
        return time.perf_counter() - began

    def close(self) -> None:
        """Of a run that ends before the last of the steps."""
        if self._running:
            with self._harmless():
                self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()

    def _report(self) -> None:
        steps = self.last - self.first + 1
        self._say(f"profile of steps {self.first} to {self.last}: {self._folder} (xprof or tensorboard --logdir shows it)")
        parts = costs(self._folder, parts_of(self._program()))
        whole = sum(parts.values())
        for name, seconds in sorted(parts.items(), key=lambda entry: -entry[1])[:SHOWN]:
            self._say(f"  {seconds / whole:6.1%}  {1e3 * seconds / steps:8.2f} ms a step  {name}")
        if any("command_buffer" in name for name in parts):
            self._say(f"  (recorded graphs hide what is in them; start Python with XLA_FLAGS=--{_GRAPHS}= to see it)")


def parts_of(program: str) -> dict[str, str]:
    """Instruction -> the part of the model that it is of: `layer/attention`, `layer/attention (backward)`."""
    return {_plain(name): _part(scope) for name, scope in _INSTRUCTION.findall(program)}


def _plain(name: str) -> str:
    """As a kernel may be called that is named after an instruction."""
    return re.sub(r"\W", "_", name)


def _part(scope: str) -> str:
    # A name inside of what JAX puts around it: transpose(jvp(attention)) is attention, on the way back.
    words = [word for word in scope.split("/")[:-1] if not _NOT_NAMES.fullmatch(word)]
    names = [name for name in (re.sub(r"^(?:\w+\()+|\)+$", "", word) for word in words) if name]
    named = "/".join(dict.fromkeys(names)) or "everything else"
    return f"{named} (backward)" if "transpose(" in scope else named


def costs(folder: Path, parts: Mapping[str, str]) -> dict[str, float]:
    """Part -> seconds of the devices, of all instructions in the newest trace under the folder."""
    file = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(file, "rt") as trace:
        events = json.load(trace)["traceEvents"]
    found: collections.Counter[str] = collections.Counter()
    for event in events:
        operation = (event.get("args") or {}).get("hlo_op")
        if event.get("ph") == "X" and operation is not None:
            # What the program does not know: at least what kind of instruction it is.
            kind = re.sub(r"[._]?\d+$", "", operation)
            found[parts.get(_plain(operation), f"unknown ({kind})")] += event["dur"] / 1e6
    return dict(found)
