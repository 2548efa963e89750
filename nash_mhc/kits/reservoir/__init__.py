"""Reservoir models: recurrences with frozen random weights, and trained gates, readouts and MLPs."""

from nash_mhc.config.kits import Kit

KIT = Kit(
    model_kinds={"reservoir": "settings:ReservoirConfig"},
    architectures={"reservoir": "architecture:ARCHITECTURE"},
    presets={"reservoir": "settings:PRESETS"},
    nicknames={"spectral_radius": "radius", "reservoir_size": "units"},
    axes={"reservoir": ("tp",)},  # independent units of a recurrence
)
