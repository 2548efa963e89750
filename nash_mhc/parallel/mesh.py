"""Build the JAX mesh from MeshConfig, and check that the model and the batch divide over it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from nash_mhc.config.keys import keys
from nash_mhc.config.schema import (
    PLATFORMS,
    ArchitectureConfig,
    ConfigError,
    DataConfig,
    DivisibleSize,
    MeshConfig,
    nearest_multiple,
)
from nash_mhc.parallel.processes import start
from nash_mhc.parallel.sharding import RULES


def _try_config(name: str, value: object) -> None:
    """Set a start-up option of JAX, unless a backend is already initialized."""
    with contextlib.suppress(RuntimeError):
        jax.config.update(name, value)


def _devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def _pick_devices(cfg: MeshConfig) -> list[jax.Device]:
    sizes = cfg.axes.values()
    wanted = cfg.num_devices or (math.prod(sizes) if -1 not in sizes else 1)
    if cfg.platforms == ("cpu",):
        _try_config("jax_platforms", "cpu")  # so that JAX reserves no accelerator memory
    processes = start(cfg)
    if wanted > 1:
        # Emulate as many host devices as the mesh needs, spread over all processes. Accelerators are not affected.
        _try_config("jax_num_cpu_devices", -(-wanted // processes))
    devices = next((devices for devices in map(_devices, cfg.platforms) if devices), [])
    if not devices:
        available = ", ".join(f"{len(d)} {name}" for name in PLATFORMS if (d := _devices(name)))
        raise ConfigError(
            f"--platform {cfg.platform}: no such device; available: {available}. Use --platform auto for the best one"
        )
    return devices


Fits = Callable[[Mapping[str, int]], bool]  # whether everything divides over a mesh of this shape


def _shapes(count: int, axes: int) -> list[tuple[int, ...]]:
    """Return all tuples of `axes` sizes whose product is `count`."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [shape for shape in itertools.product(divisors, repeat=axes) if math.prod(shape) == count]


def nearest_shape(wanted: Mapping[str, int], available: int, fits: Fits, *, all_devices: bool = False) -> dict[str, int] | None:
    """Return the mesh of at most `available` devices that fits, uses most devices and is nearest to `wanted`.

    The first axis, data, has the lowest weight: it hardly changes the step or its memory.
    """
    weights = [0.1, *[1.0] * (len(wanted) - 1)]
    distance = lambda shape: sum(
        weight * abs(math.log(n / max(1, size))) for weight, n, size in zip(weights, shape, wanted.values(), strict=True)
    )
    for count in range(available, available - 1 if all_devices else 0, -1):
        for shape in sorted(_shapes(count, len(wanted)), key=distance):
            if fits(candidate := dict(zip(wanted, shape, strict=True))):
                return candidate
    return None


def as_flags(shape: Mapping[str, int], in_use: int) -> str:
    """Return the flags for this mesh; `in_use` devices are used without --num-devices."""
    count = math.prod(shape.values())
    flags = [f"--mesh-{axis} {size}" for axis, size in shape.items()]
    return " ".join(flags + [f"--num-devices {count}"] * (count != in_use))


def _proposed(cfg: MeshConfig, in_use: int, fits: Fits) -> str:
    """Return the flags for the nearest mesh of the devices in use, as the end of an error message."""
    fixed = math.prod(size for size in cfg.axes.values() if size != -1)
    wanted = {axis: max(1, in_use // fixed) if size == -1 else size for axis, size in cfg.axes.items()}
    shape = nearest_shape(wanted, in_use, fits)
    return "" if shape is None else f"; try {as_flags(shape, cfg.num_devices or 0)}"


def mesh_shape(cfg: MeshConfig, platform: str, available: int, fits: Fits = lambda _: True) -> tuple[int, ...]:
    """Return the mesh shape for `available` devices of this platform; raise ConfigError if they cannot form it.

    Errors propose only meshes that satisfy `fits`.
    """
    if cfg.num_devices is not None and cfg.num_devices > available:
        proposed = _proposed(cfg, available, fits)
        raise ConfigError(f"--num-devices {cfg.num_devices}: only {available} {platform} device(s) are available{proposed}")
    # A CPU emulates any number of devices, so the mesh says how many are in use. The default mesh uses one device
    # everywhere, and `describe` mentions the idle ones.
    sizes = list(cfg.axes.values())
    by_mesh = (platform == "cpu" and -1 not in sizes) or set(sizes) == {1}
    in_use = cfg.num_devices or (math.prod(sizes) if by_mesh else available)
    if -1 in sizes:
        fixed = math.prod(size for size in sizes if size != -1)
        if in_use % fixed:
            proposed = _proposed(cfg, in_use, fits)
            raise ConfigError(
                f"mesh {cfg}: {fixed} does not divide the {in_use} devices in use, so the axis set to -1 cannot be "
                f"inferred{proposed}"
            )
        sizes[sizes.index(-1)] = in_use // fixed
    shape = tuple(sizes)
    need = math.prod(shape)
    if need != in_use:
        own = dict(zip(cfg.axes, shape, strict=True))
        as_it_is = f", or --num-devices {need}" if need <= available and fits(own) else ""
        raise ConfigError(
            f"mesh {cfg} needs {need} device(s), but {in_use} {platform} device(s) are in use"
            f"{_proposed(cfg, in_use, fits)}{as_it_is}"
        )
    if need > available:
        raise ConfigError(
            f"mesh {cfg} needs {need} devices, but JAX is already initialized with {available} cpu device(s); build "
            f"the mesh before any other JAX call, or set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        )
    return shape


def make_mesh(cfg: MeshConfig, fits: Fits = lambda _: True) -> Mesh:
    """Join the other processes, choose the platform and devices, and build the mesh."""
    devices = _pick_devices(cfg)
    shape = mesh_shape(cfg, devices[0].platform, len(devices), fits)
    if jax.process_count() > 1 and math.prod(shape) != len(devices):
        raise ConfigError(
            f"mesh {cfg} uses {math.prod(shape)} of {len(devices)} devices, but with {jax.process_count()} processes it "
            f"must use all of them; set --mesh-data -1 to use the rest"
        )
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(cfg.axes), axis_types=kinds, devices=devices[: math.prod(shape)])


def describe(mesh: Mesh) -> str:
    """Return the first line of a run, such as `8 x cpu, mesh 2x2x2 (data x fsdp x tp)`."""
    device = mesh.devices.flat[0]
    shape = "x".join(map(str, mesh.shape.values()))
    count = len({d.process_index for d in mesh.devices.flat})
    split = f", mesh {shape} ({' x '.join(mesh.axis_names)})" if mesh.size > 1 else ""
    text = f"{mesh.size} x {device.device_kind}{f' in {count} processes' * (count > 1)}{split}"
    idle = 0 if device.platform == "cpu" else len(_devices(device.platform)) - mesh.size
    return text + (f"; {idle} more are idle: use them with --mesh-data -1" if idle > 0 else "")


def indivisible_sizes(data: DataConfig, model: ArchitectureConfig, mesh_shape: Mapping[str, int]) -> list[DivisibleSize]:
    """Return the sizes that their mesh axes do not divide. Inside jit, such an axis would silently be replicated."""
    of_data = [DivisibleSize("batch", data.batch_size, "--batch-size"), DivisibleSize("time_split", data.seq_len, "--seq-len")]
    return [size for size in (*of_data, *model.divisible_sizes()) if size.size % _shards(size, mesh_shape)]


def check_fit(
    data: DataConfig,
    model: ArchitectureConfig,
    mesh_shape: Mapping[str, int],
    *,
    resizable: Collection[str] = ("data", "model"),
) -> None:
    """Raise ConfigError if sizes do not divide over the mesh; names them all, with settings that work.

    `resizable`: the sections whose keys may be proposed, besides another mesh.
    """
    if not (found := indivisible_sizes(data, model, mesh_shape)):
        return
    names: dict[str, list[str]] = {}
    for size in found:
        over = f"{' x '.join(RULES[size.axis])} = {_shards(size, mesh_shape)}"
        names.setdefault(over, []).append(f"{size.flag} {size.size}")
    (over, first), *others = ((over, " and ".join(sizes)) for over, sizes in names.items())
    rest = "".join(f", {sizes} over {over}" for over, sizes in others)
    remedies, count = [], math.prod(mesh_shape.values())
    fits = lambda shape: not indivisible_sizes(data, model, shape)
    other = nearest_shape(mesh_shape, count, fits, all_devices=jax.distributed.is_initialized())
    if other is not None:
        remedies.append(as_flags(other, count))
    if (resized := _suggest_sizes(data, model, found, mesh_shape, resizable)) is not None:
        remedies.append(resized)
    if not remedies:
        remedies.append("another size: no mesh of all devices fits")
    raise ConfigError(f"{first} cannot be split over {over}{rest}; try {', or '.join(remedies)}")


def _shards(size: DivisibleSize, mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in RULES[size.axis])


def _suggest_sizes(
    data: DataConfig,
    model: ArchitectureConfig,
    found: list[DivisibleSize],
    mesh_shape: Mapping[str, int],
    resizable: Collection[str],
) -> str | None:
    """Return flags with sizes that fit the mesh and are valid settings; None if there are none."""
    paths = {key.flag: key.path.partition(".")[::2] for key in keys(model.architecture).values()}
    sections: dict[str, Any] = {"data": data, "model": model}
    wanted: dict[str, int] = {}
    for indivisible in found:
        section, name = paths.get(indivisible.flag, ("", ""))
        if section not in resizable or (indivisible.axis == "time_split" and Path(data.dataset).is_dir()):
            return None  # a prepared dataset has a fixed sequence length
        wanted |= _nearest(model, indivisible, _shards(indivisible, mesh_shape), getattr(sections[section], name))
    changes = {section: {paths[f][1]: size for f, size in wanted.items() if paths[f][0] == section} for section in sections}
    try:
        data, model = (dataclasses.replace(section, **changes[name]) for name, section in sections.items())
        model.check_rows(data.seq_len)
    except ConfigError:
        return None
    if indivisible_sizes(data, model, mesh_shape):
        return None
    return " ".join(f"{flag} {size}" for flag, size in wanted.items())


def _nearest(model: ArchitectureConfig, indivisible: DivisibleSize, shards: int, value: int) -> dict[str, int]:
    """Return flags that make this size divisible by `shards`; `value` is what its flag is set to now."""
    axis, size, flag = indivisible
    if axis == "vocab":  # upwards for the tokenizer; the model pads to a multiple of 128
        unit = math.lcm(128, shards)
        return {flag: -(-size // unit) * unit}
    of = {other.axis: other.size for other in model.divisible_sizes()}
    if axis not in ("heads", "kv_heads") or "kv_heads" not in of:
        # Sequences contain whole coarse blocks; a size may be a fraction of its flag's value.
        unit = math.lcm(shards, model.alignment) if axis == "time_split" else shards * (value // size)
        return {flag: nearest_multiple(value, unit)}
    heads = nearest_multiple(of["heads"], shards)
    shared = [k for k in range(shards, heads + 1, shards) if heads % k == 0]
    kv_heads = {"--model-kv-heads": min(shared, key=lambda k: abs(k - of["kv_heads"]))}
    return {flag: heads} | kv_heads if axis == "heads" else kv_heads
