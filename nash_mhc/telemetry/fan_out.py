"""The stream of a run's numbers: every row goes to every sink, and a sink that fails stops nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nash_mhc.checkpoint.run_folder import EVALUATIONS, METRICS, ROW_FILES, Row
from nash_mhc.checkpoint.run_lock import Nobody, Owner
from nash_mhc.storage.errors import as_os_errors, reason
from nash_mhc.storage.paths import Folder
from nash_mhc.telemetry.sinks import EventFile, JsonLines, Sink


class Telemetry:
    """Rows by step, to the files under `folder` and to the sinks `others`.

    A resumed run first drops the rows of the steps that it is about to take again, and of evaluations after step
    `evaluated`, which it is about to make again:
    an earlier process may have done both, and have left no checkpoint of it.

    What cannot be written waits in memory and is reported once: numbers are no reason to stop a run.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        start_step: int = 0,
        evaluated: int | None = None,
        say: Callable[[str], None] = lambda text: None,
        owner: Owner = Nobody(),
        others: Sequence[Sink] = (),
        texts: Mapping[str, str] = {},
    ) -> None:
        self._folder, self._say, self._faulty, self._owner = folder, say, False, owner
        with as_os_errors():
            until = {METRICS: start_step, EVALUATIONS: start_step if evaluated is None else evaluated}
            rows = [JsonLines(folder, name, until[name], say) for name in ROW_FILES]
        self._sinks: list[Sink] = [*rows, EventFile(folder, start_step, texts), *others]
        self._flush()

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None:
        for sink in self._sinks:
            sink.add(step, row, file)
        self._flush()

    def _flush(self, *, last: bool = False) -> None:
        fault: tuple[str, OSError] | None = None
        for sink in self._sinks:
            try:
                self._owner.check()  # whose folder it is now, its rows are no business of this run
                sink.flush(last=last)
            except OSError as error:
                fault = fault or (sink.name, error)
        if fault and not self._faulty:
            self._say(f"{fault[0]} could not be written ({reason(fault[1])}, {self._folder}); its rows wait, training goes on")
        elif self._faulty and not fault:
            self._say(f"metrics are written to {self._folder} again, with the rows that had waited")
        self._faulty = fault is not None

    def close(self) -> None:
        self._flush(last=True)
        lost: dict[str, int] = {}
        for sink in self._sinks:
            name = "metrics" if sink.name in ROW_FILES else sink.name
            lost[name] = lost.get(name, 0) + sink.waiting
        for name, count in lost.items():
            if count:
                self._say(f"{count} row{'s' * (count > 1)} of {name} could not be written to {self._folder}")


class Nowhere(Telemetry):
    """Of a process whose numbers another one writes down."""

    def __init__(self) -> None: ...

    def write(self, step: int, row: Row, *, file: str = METRICS) -> None: ...

    def close(self) -> None: ...
