"""`python -m nash_mhc.hub`: the command of the Hugging Face kit."""

import sys

from nash_mhc.config.commands import one_line_errors
from nash_mhc.config.kits import run_command

if __name__ == "__main__":
    sys.exit(one_line_errors(lambda: run_command("hub")))
else:  # for `from nash_mhc.hub.load import load` of earlier versions
    from nash_mhc.loading import load

    sys.modules[f"{__name__}.load"] = load
