"""Whether all processes of a run were started with the same settings; asked before anything else is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.schema import ConfigError
from nash_mhc.parallel.board import Board, LostProcess, joined, named, waiting

_PATIENCE_S = 60.0  # they have all connected: what they compare is there at once
_SHOWN = 60  # characters of a value
_asked = 0


def check_same(settings: Mapping[str, Any], patience: float = _PATIENCE_S) -> None:
    """ConfigError in every process, with the first name whose value is not the same in all, and two of its values.

    No device is used. All processes call it, in the same order. LostProcess names who is missing.
    """
    global _asked  # noqa: PLW0603
    state = joined()
    if (count := state.num_processes or 1) == 1:
        return
    _asked += 1
    board, me = Board(f"nash_mhc/same{_asked}"), state.process_id
    board.write(f"settings/{me}", {"--num-processes": count} | dict(settings))
    with waiting():
        _until_all(board, "settings", 1, patience)
        count = board.read("settings")["0"]["--num-processes"]  # what process 0 was started with
        _until_all(board, "settings", count, patience)
    everyone = board.read("settings")
    first = everyone["0"]
    for other in range(1, count):
        its = everyone[str(other)]
        names = [name for name in {**first, **its} if first.get(name) != its.get(name)]
        if not names:
            continue
        board.write(f"read/{me}", True)
        if me == 0:  # the notes end with process 0: the others read them first
            _until_all(board, "read", count, patience)
            time.sleep(1.0)
        differences = [
            f"{name} {_shown(first.get(name))} in process 0, {_shown(its.get(name))} in process {other}" for name in names
        ]
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(
            f"the processes of this run differ: {'; '.join(differences[:3])}{more}; start all of them with the same "
            "flags, files and packages"
        )


def _shown(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _until_all(board: Board, folder: str, count: int, seconds: float) -> None:
    """Wait for the notes of the first `count` processes."""
    end, look = time.monotonic() + seconds, 0.05
    while missing := sorted(set(range(count)) - set(map(int, board.read(folder)))):
        if time.monotonic() > end:
            text = f"{named(missing)} connected and has not sent its settings within {seconds:.0f} s: gone or frozen"
            raise LostProcess(text, *missing)
        time.sleep(look)
        look = min(1.0, look * 1.2)
