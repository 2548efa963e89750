import gc
import sys

if sys.argv[:1] == ["-m"]:  # Python is looking for this package's __main__: a training run begins, with slow imports
    gc.disable()  # modules stay: looking for what can be freed would be an eighth of their time
    from nash_mhc.runtime.signals import SIGNALS

    SIGNALS.listen()

from nash_mhc.train.trainer import Result as Result
from nash_mhc.train.trainer import run as run
