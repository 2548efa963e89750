"""nash_mhc: pretrains language models over a data x fsdp x tp mesh, on TPU, GPU or plain CPU."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the caller decides which messages are shown

__version__ = "0.1.0"
