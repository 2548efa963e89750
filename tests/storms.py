"""How many times a test lets misfortune strike:
the whole number with STORMS=full in the environment, else a part of it.

`make test` takes the part; whoever changes what survives (signals, saves, locks) runs the whole,
and `python -m tests.soak`.
"""

import os

FULL = os.environ.get("STORMS") == "full"


def times(whole: int, part: int) -> int:
    return whole if FULL else part
