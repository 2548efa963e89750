"""`python -m nash_mhc.doctor.child TASK SETTINGS`: what may hang or die, in a process of its own.

What it finds goes to its standard output; `isolated.py` listens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import threading

from nash_mhc.doctor.teller import Stop, Teller

TASKS = {
    "accelerators": "nash_mhc.doctor.machine",
    "devices": "nash_mhc.doctor.devices",
    "storage": "nash_mhc.doctor.disk",
    "smoke": "nash_mhc.doctor.smoke",
}


def _end_with_parent(scratch: str | None) -> None:
    """Whatever ends the process that started this one closes its end of our standard input."""
    os.read(0, 1)  # sys.stdin would hold a lock that the interpreter wants at its end
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)  # by way of every `finally`: what was written for the check goes


def main() -> int:
    task, settings = sys.argv[1], json.loads(sys.argv[2])
    signal.signal(signal.SIGTERM, _leave)
    tell = Teller(os.dup(1))
    os.dup2(2, 1)  # what libraries print is no word of ours
    threading.Thread(target=_end_with_parent, args=(settings.get("scratch"),), daemon=True).start()
    with contextlib.suppress(Stop):
        importlib.import_module(TASKS[task]).check(tell, **settings)
    # Not by way of the interpreter's end, where threads of a device that does not answer would be waited for.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
