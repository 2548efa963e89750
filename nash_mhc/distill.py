"""`python -m nash_mhc.distill`: the command of the distillation kit."""

import sys

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.kits import run_command

if __name__ == "__main__":
    sys.exit(one_line_errors(lambda: run_command("distill")))
