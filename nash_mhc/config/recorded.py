"""Settings as run.json has recorded them, for a start that takes them over. No I/O."""

from __future__ import annotations

from typing import Any

# Keys of one start of a run, which the next one does not take over.
PER_START = {
    "train.checkpoint_dir", "train.resume", "train.wait_for_lock", "mesh.coordinator_address", "mesh.num_processes",
    "mesh.process_id", "mesh.connect_timeout", "telemetry.log_format",
}  # fmt: skip
_FILLED_IN = {"train.dtype", "train.attention", "train.unroll"}


def is_run_json(names: set[str]) -> bool:
    """Whether a file with these keys at its top is a run.json: no file of settings has such keys."""
    return "config" in names and "parameters" in names


def is_taken_over(path: str, *, as_asked: bool) -> bool:
    """Whether the next start takes over this key. `as_asked`: settings are recorded as the user gave them; else, by
    earlier versions, with what was filled in for the devices of then."""
    return path not in PER_START and (as_asked or (path not in _FILLED_IN and not path.startswith("mesh.")))


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    """Nested settings -> section.key: value."""
    sections = {name: section for name, section in values.items() if isinstance(section, dict)}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in values.items() if name not in sections} | found


def taken_over(settings: dict[str, Any], *, as_asked: bool) -> dict[str, Any]:
    return {path: value for path, value in settings.items() if is_taken_over(path, as_asked=as_asked)}
