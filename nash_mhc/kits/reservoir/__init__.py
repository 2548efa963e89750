"""Models whose recurrences are frozen random weights, with trained gates, readouts and feed-forward layers."""

from nash_mhc.config.kits import Kit

KIT = Kit(
    model_kinds={"reservoir": "settings:ReservoirConfig"},
    architectures={"reservoir": "architecture:ARCHITECTURE"},
    presets={"reservoir": "settings:PRESETS"},
    nicknames={"spectral_radius": "radius", "reservoir_size": "units"},
    axes={"reservoir": ("tp",)},  # units of a recurrence, each by itself
)
