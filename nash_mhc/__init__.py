"""nash_mhc: pretrains language models over a data x fsdp x tp mesh, on TPU, GPU or plain CPU."""

__version__ = "0.1.0"
