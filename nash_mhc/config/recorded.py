"""Settings recorded in run.json, and which of them the next start inherits. No I/O."""

from __future__ import annotations

from typing import Any

# Earlier versions recorded the sections of all kits. These are the values that a run without the kit recorded.
_UNUSED: dict[str, dict[str, Any]] = {
    "distill": {
        "temperature": 1.0, "text": 0.0, "hard": 0.0, "teacher": None, "top_k": 128, "random": 0, "layers": 0.0,
        "anchor": 0.0, "renormalised": False,
    },
    "quantize": {
        "weights": None, "group": 32, "levels": "uniform", "magnitudes": False, "rest": 0.0, "trains": "both",
    },
}  # fmt: skip

# Keys that belong to one start of a run and are not inherited.
PER_START = {
    "train.checkpoint_dir", "train.resume", "train.wait_for_lock", "mesh.coordinator_address", "mesh.num_processes",
    "mesh.process_id", "mesh.connect_timeout", "telemetry.log_format", "telemetry.log_level",
}  # fmt: skip
_FILLED_IN = {"train.dtype", "train.attention", "train.unroll"}


def is_unused(section: str, values: Any) -> bool:
    """Return whether an earlier version recorded this section of a kit for a run that did not use the kit."""
    defaults = _UNUSED.get(section)
    return defaults is not None and isinstance(values, dict) and values.items() <= defaults.items()


def is_run_json(names: set[str]) -> bool:
    """Return whether a file with these top-level keys is a run.json, not a file of settings."""
    return "config" in names and "parameters" in names


def is_inherited(path: str, *, as_asked: bool) -> bool:
    """Return whether the next start inherits this key.

    as_asked: the settings were recorded as the user gave them; earlier versions recorded them after filling in
    device-dependent values, which are not inherited.
    """
    return path not in PER_START and (as_asked or (path not in _FILLED_IN and not path.startswith("mesh.")))


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to {section.key: value}."""
    sections = {name: section for name, section in values.items() if isinstance(section, dict)}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in values.items() if name not in sections} | found


def inherited(settings: dict[str, Any], *, as_asked: bool) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if is_inherited(path, as_asked=as_asked)}
