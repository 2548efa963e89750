"""The mesh of devices: its axes, which devices, and which processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, axis, key

PLATFORMS = ("tpu", "gpu", "cpu")  # what `auto` takes, in this order


@dataclass(frozen=True)
class MeshConfig(Section):
    section = "mesh"

    # The axes of the mesh, outermost first.
    # Another one is a line here, and a name in the RULES of parallel/sharding.py.
    data: int = axis("devices along data: whole copies, each with its share of the batch (-1: the rest)")
    fsdp: int = axis("devices along fsdp: batch and parameters are split (-1: the rest)")
    tp: int = axis("devices along tp: heads, ffn and vocabulary are split (-1: the rest)")
    num_devices: int | None = key(None, "use only this many of the devices there are", low=1, flag="num-devices")
    platform: str = key(
        "auto", "tpu, gpu or cpu, or several in the order of your wish (tpu,cpu); auto is tpu,gpu,cpu", flag="platform"
    )
    profile_for: str | None = key(
        None,
        "take the batch and the learning rate that suit this kind of device; keys of your own go before",
        choices=PLATFORMS,
        flag="profile-for",
        further="profile",
    )
    coordinator_address: str | None = key(
        None, "HOST:PORT of process 0 (none: from the scheduler, else one process)", flag="coordinator-address"
    )
    num_processes: int | None = key(
        None, "processes of the whole run (1: alone, whatever the scheduler says)", low=1, flag="num-processes"
    )
    process_id: int | None = key(None, "number of this process, from 0 on", low=0, flag="process-id")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in self.axes.items():
            if size == 0:
                raise ConfigError(f"mesh.{name} must be a positive number of devices or -1 for the rest, not 0")
        if unknown := [name for name in self.platforms if name not in PLATFORMS]:
            raise ConfigError(
                f"mesh.platform {self.platform!r}: must be auto, or {', '.join(PLATFORMS)} in the order of your wish, not "
                f"{unknown[0]!r}"
            )
        rest = [name for name, size in self.axes.items() if size == -1]
        if len(rest) > 1:
            raise ConfigError(f"only one mesh axis may be -1 (the rest), not {' and '.join('mesh.' + n for n in rest)}")

    @property
    def platforms(self) -> tuple[str, ...]:
        """Kinds of devices, the first choice first."""
        return PLATFORMS if self.platform == "auto" else tuple(name.strip() for name in self.platform.split(","))

    @property
    def axes(self) -> dict[str, int]:
        """Devices along each axis, in the order of the mesh."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["axis"]}

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.axes.values()))} ({' x '.join(self.axes)})"
