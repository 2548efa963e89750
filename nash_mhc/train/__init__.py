import sys

if sys.argv[:1] == ["-m"]:  # Python is looking for this package's __main__: a training run begins, with slow imports
    from nash_mhc.train.signals import SIGNALS

    SIGNALS.listen()

from nash_mhc.train.run import Result as Result
from nash_mhc.train.run import run as run
