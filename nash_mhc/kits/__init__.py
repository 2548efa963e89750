"""Optional capabilities, one folder each, which `config/kits.py` finds and loads.

Folders outside of the package (`--kit`) are found beside these, in child processes too.
"""

import os

from nash_mhc.config.kits import OUTSIDE

__path__ += [os.path.dirname(folder) for folder in os.environ.get(OUTSIDE, "").split(os.pathsep) if folder]
