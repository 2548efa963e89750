import gc
import sys

if sys.argv[:1] == ["-m"]:  # `python -m nash_mhc.train` is looking for `__main__`, whose imports are slow
    gc.disable()  # imported modules stay: garbage collection would take an eighth of the import time
    from nash_mhc.runtime.signals import SIGNALS

    SIGNALS.listen()

from nash_mhc.train.trainer import Result as Result
from nash_mhc.train.trainer import run as run
