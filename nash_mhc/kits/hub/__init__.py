"""Hugging Face: models are read, imported and exported, and so are PEFT adapters."""

from nash_mhc.config.kits import Command, Kit

KIT = Kit(
    formats={"config.json": "folder:FORMAT", "adapter_config.json": "adapters:FORMAT"},
    commands={"hub": Command("import and export Hugging Face models", "nash_mhc.kits.hub.command:main")},
)
