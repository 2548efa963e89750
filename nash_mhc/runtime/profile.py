"""`--profile 50:55`: an XProf trace of those steps, and their time by part of the model."""

from __future__ import annotations

import collections
import contextlib
import gzip
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger(__name__)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata=\{[^}]*op_name=\"([^\"]+)\"", re.MULTILINE)
# Components of op names that JAX adds for calls, loops and differentiation.
_ADDED_BY_JAX = re.compile(
    r"p?jit\(.*|eval_jaxpr|while|body|cond|branch\w*|closed_call|checkpoint|remat\w*|custom_\w+|scan|.*->.*"
)
_GRAPHS = "xla_gpu_enable_command_buffer"  # which operations are recorded as CUDA graphs
SHOWN = 10  # parts printed


def disable_command_buffers() -> None:
    """Turn off CUDA graphs, whose kernels have no names in a trace. Call before JAX initializes devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _GRAPHS not in flags and Path("/dev/nvidiactl").exists():
        os.environ["XLA_FLAGS"] = f"{flags} --{_GRAPHS}=".strip()


class Profile:
    """Traces steps `first` to `last` into `folder`.

    `program` returns the HLO text of the compiled step, which has the op name of each instruction.
    """

    def __init__(self, first: int, last: int, folder: Path, program: Callable[[], str]) -> None:
        self.first, self.last = first, last
        self._folder, self._program = folder, program
        self._running = False

    @contextlib.contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Report a failed trace and continue: it must not stop a run."""
        try:
            yield
        except Exception as error:
            self._running = False
            log.warning(f"no profile: {type(error).__name__}: {' '.join(str(error).split())[:200]}; training continues")

    def before(self, step: int, state: Any) -> float:
        """Start the trace before the first step, once `state` is ready; return the seconds that this took."""
        if step != self.first:
            return 0.0
        jax.block_until_ready(state)
        start = time.perf_counter()
        with self._report_failure():
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        return time.perf_counter() - start

    def after(self, step: int, state: Any) -> float:
        """After the last step, wait for its result, write and analyze the trace; return the seconds that this took."""
        if not (self._running and step == self.last):
            return 0.0
        jax.block_until_ready(state)
        start = time.perf_counter()
        with self._report_failure():
            self._stop()
            self._report()
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop the trace if the run ends early."""
        if self._running:
            with self._report_failure():
                self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()

    def _report(self) -> None:
        steps = self.last - self.first + 1
        log.info(f"profile of steps {self.first} to {self.last}: {self._folder} (view it with xprof or tensorboard --logdir)")
        parts = costs(self._folder, parts_of(self._program()))
        whole = sum(parts.values())
        for name, seconds in sorted(parts.items(), key=lambda entry: -entry[1])[:SHOWN]:
            log.info(f"  {seconds / whole:6.1%}  {1e3 * seconds / steps:8.2f} ms/step  {name}")
        if any("command_buffer" in name for name in parts):
            log.info(f"  (CUDA graphs hide their kernels; set XLA_FLAGS=--{_GRAPHS}= before starting Python to see them)")


def parts_of(program: str) -> dict[str, str]:
    """Return the part of the model for each instruction, such as `layer/attention (backward)`."""
    return {_plain(name): _part(scope) for name, scope in _INSTRUCTION.findall(program)}


def _plain(name: str) -> str:
    """Return the name of the kernel for an instruction."""
    return re.sub(r"\W", "_", name)


def _part(scope: str) -> str:
    # transpose(jvp(attention)) is the backward pass of attention
    words = [word for word in scope.split("/")[:-1] if not _ADDED_BY_JAX.fullmatch(word)]
    names = [name for name in (re.sub(r"^(?:\w+\()+|\)+$", "", word) for word in words) if name]
    named = "/".join(dict.fromkeys(names)) or "other"
    return f"{named} (backward)" if "transpose(" in scope else named


def costs(folder: Path, parts: Mapping[str, str]) -> dict[str, float]:
    """Return the device seconds per part in the latest trace under `folder`."""
    file = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(file, "rt") as trace:
        events = json.load(trace)["traceEvents"]
    seconds: collections.Counter[str] = collections.Counter()
    for event in events:
        operation = (event.get("args") or {}).get("hlo_op")
        if event.get("ph") == "X" and operation is not None:
            # Instructions that are not in the program text: show at least their kind.
            kind = re.sub(r"[._]?\d+$", "", operation)
            seconds[parts.get(_plain(operation), f"unknown ({kind})")] += event["dur"] / 1e6
    return dict(seconds)
