"""Signs of life: each process of a run leaves one on a shared board every second or so,
and reads those of the others."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax

from nash_mhc.parallel.board import ANSWER_S, Board, LostProcess

SILENCE_S = 20.0  # without a sign of life for this long, a process is taken for dead
BEGIN_S = 120.0  # and for this long, one that has connected and given none yet

Sign = dict[str, Any]  # name, phase, moves, at, ended


@dataclass
class _Peer:
    """Another process: its last sign of life, and for how long there has been no new one."""

    sign: Sign
    silent: float = 0.0


class Heartbeat:
    """Times are counted in looks of `tick` seconds, not by the clock: a machine that was asleep has lost nobody."""

    def __init__(self, board: Board, index: int, count: int, tick: float) -> None:
        self._board, self._index, self._count, self._tick = board, index, count, tick
        self._peers: dict[str, _Peer] = {}
        self.looked = 0.0  # seconds with an answer
        self._unanswered = 0.0  # seconds since the last one
        self.missing: list[int] = []  # who has given no sign of life in all of them
        self.all_run = False  # whether everyone who has given one is still at work

    def exchange(self, mine: Sign) -> dict[str, Any] | None:
        """Leaves a sign of life and reads the others'; returns the notes on the board. None: it cannot be reached,
        because process 0, which holds it, is gone or frozen."""
        try:
            self._board.write(f"life/{self._index}", mine)
            signs, notes = self._board.read("life"), self._board.read("notes")
        except jax.errors.JaxRuntimeError as error:
            # A frozen process has not answered for so long by now, a dead one answers at once.
            self._unanswered += ANSWER_S if isinstance(error, LostProcess) and error.frozen else self._tick
            return None
        self.looked, self._unanswered = self.looked + self._tick, 0.0
        self.missing = [index for index in range(self._count) if str(index) not in signs]
        running = {index: sign for index, sign in signs.items() if not sign["ended"]}
        self.all_run = len(running) == len(signs)
        for index, sign in running.items():
            peer = self._peers.setdefault(index, _Peer(sign))
            peer.silent, peer.sign = (peer.silent + self._tick if sign == peer.sign else 0.0), sign
        return notes

    def lost(self, patience: float) -> str | None:
        """Who is gone, in a sentence: nothing was heard of it for `patience` seconds, or, since the beginning,
        for longer."""
        if self.missing and self.looked >= BEGIN_S:
            return self.never_came()
        for peer in self._peers.values():
            if peer.silent >= min(SILENCE_S, patience):
                name, phase = peer.sign["name"], peer.sign["phase"]
                silence = f"no sign of life for {peer.silent:.0f} s"
                return f"{name} is gone or frozen, {silence}; the last that is known of it: {phase}"
        return None

    def coordinator_lost(self) -> str | None:
        """Process 0 holds the notes, and gives no answer."""
        if self._unanswered < min(SILENCE_S, ANSWER_S):
            return None
        known = self._peers.get("0")
        phase = f"; the last that is known of it: {known.sign['phase']}" if known else ""
        name = known.sign["name"] if known else "process 0"
        return f"{name} is gone or frozen, no answer for {self._unanswered:.0f} s{phase}"

    def never_came(self) -> str:
        """Killed after the processes had found each other, before it had begun to watch over the others."""
        names = " and ".join(f"process {index}" for index in self.missing)
        return f"{names} connected and has given no sign of life since: gone, most likely"

    def signs(self) -> dict[str, Sign]:
        """The last one of each process that was heard of."""
        return {index: peer.sign for index, peer in self._peers.items()}

    def end(self, mine: Sign) -> None:
        """This process has done its work: there will be silence, and nothing to worry about."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._board.write(f"life/{self._index}", mine | {"ended": True})
