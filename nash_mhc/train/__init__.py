from nash_mhc.train.run import Result as Result
from nash_mhc.train.run import run as run
