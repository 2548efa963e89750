"""Quantization-aware training with 2 to 4 bits, and packed model folders."""

from nash_mhc.config.kits import HubCommand, Kit

_PACK = HubCommand(
    "Write a run with quantized weights to a folder that stores only the quantized values and their scales.",
    "nash_mhc.kits.quantize.packed:main",
)

KIT = Kit(
    sections={"quantize": "settings:QuantizeConfig"},
    axes={"groups": (), "levels": ()},  # groups of inputs that share a scale; quantization levels
    weights={"quantize": "weights:quantized"},
    formats={"packed.json": "packed:FORMAT"},
    hub_commands={"pack": _PACK},
)
