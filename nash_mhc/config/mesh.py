"""Keys of the device mesh: axes, devices and processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, axis, key

PLATFORMS = ("tpu", "gpu", "cpu")  # the order of `auto`


@dataclass(frozen=True)
class MeshConfig(Section):
    section, prefixed = "mesh", True

    # Mesh axes, outermost first. A new axis needs a line here and its name in RULES of parallel/sharding.py.
    data: int = axis("devices along data: each group holds all parameters and a share of the batch (-1: the rest)")
    fsdp: int = axis("devices along fsdp: batch and parameters are split (-1: the rest)")
    tp: int = axis("devices along tp: heads, MLP and vocabulary are split (-1: the rest)")
    num_devices: int | None = key(None, "number of devices to use (none: all)", low=1, flag="num-devices")
    platform: str = key(
        "auto", "tpu, gpu, cpu, or several in order of preference (tpu,cpu); auto: tpu,gpu,cpu", flag="platform"
    )
    profile_for: str | None = key(
        None,
        "use the batch size and learning rate for this kind of device; your own flags override them",
        choices=PLATFORMS,
        flag="profile-for",
        further="profile",
    )
    coordinator_address: str | None = key(
        None, "HOST:PORT of process 0 (none: from the scheduler, else a single process)", flag="coordinator-address"
    )
    num_processes: int | None = key(
        None, "processes of the run (1: a single process, ignores the scheduler)", low=1, flag="num-processes"
    )
    process_id: int | None = key(None, "index of this process, from 0", low=0, flag="process-id")
    connect_timeout: float = key(60.0, "seconds to wait for the other processes at the start", above=0, flag="connect-timeout")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in self.axes.items():
            if size == 0:
                raise ConfigError(f"mesh.{name} must be a positive number of devices or -1 for the rest, not 0")
        if unknown := [name for name in self.platforms if name not in PLATFORMS]:
            raise ConfigError(
                f"mesh.platform {self.platform!r}: must be auto, or some of {', '.join(PLATFORMS)} in order of preference, "
                f"not {unknown[0]!r}"
            )
        rest = [name for name, size in self.axes.items() if size == -1]
        if len(rest) > 1:
            raise ConfigError(f"only one mesh axis may be -1 (the rest), not {' and '.join('mesh.' + n for n in rest)}")

    @property
    def platforms(self) -> tuple[str, ...]:
        """Return the device kinds in order of preference."""
        return PLATFORMS if self.platform == "auto" else tuple(name.strip() for name in self.platform.split(","))

    @property
    def axes(self) -> dict[str, int]:
        """Return the number of devices along each axis, in mesh order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["axis"]}

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.axes.values()))} ({' x '.join(self.axes)})"
