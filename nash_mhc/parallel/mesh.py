"""MeshConfig -> jax Mesh: which devices, how many, in what shape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from jax.sharding import AxisType, Mesh

from nash_mhc.config.key_names import keys
from nash_mhc.config.schema import PLATFORMS, ArchitectureConfig, ConfigError, Length, MeshConfig, RunConfig, nearest_multiple
from nash_mhc.parallel.processes import start
from nash_mhc.parallel.sharding import RULES


def _try_config(name: str, value: object) -> None:
    """Sets a start-up option of JAX; once a backend runs, what is there stays."""
    with contextlib.suppress(RuntimeError):
        jax.config.update(name, value)


def _found(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def _pick_devices(cfg: MeshConfig) -> list[jax.Device]:
    sizes = cfg.axes.values()
    wanted = cfg.num_devices or (math.prod(sizes) if -1 not in sizes else 1)
    if cfg.platforms == ("cpu",):
        _try_config("jax_platforms", "cpu")  # keeps JAX from taking an accelerator's memory that the run will not use
    processes = start(cfg)
    if wanted > 1:
        # Host devices are emulated: as many as the mesh asks for, spread over all processes.
        # Accelerators are not affected.
        _try_config("jax_num_cpu_devices", -(-wanted // processes))
    devices = next((devices for devices in map(_found, cfg.platforms) if devices), [])
    if not devices:
        there = ", ".join(f"{len(d)} {name}" for name in PLATFORMS if (d := _found(name)))
        raise ConfigError(
            f"--platform {cfg.platform}: no such device here; there is {there}. Use --platform auto to take the best"
        )
    return devices


Suits = Callable[[Mapping[str, int]], bool]  # whether everything divides over a mesh of this shape


def _shapes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All sizes of so many axes that multiply to `count`."""
    if axes == 1:
        yield (count,)
    else:
        for first in (n for n in range(1, count + 1) if count % n == 0):
            yield from ((first, *rest) for rest in _shapes(count // first, axes - 1))


def nearest_shape(wanted: Mapping[str, int], there: int, suits: Suits, *, all_devices: bool = False) -> dict[str, int] | None:
    """The mesh of at most `there` devices that suits, uses most of them and differs least from `wanted`.

    More or fewer copies along the first axis, data, count least: they change neither the step nor its memory much.
    """
    weights = [0.1, *[1.0] * (len(wanted) - 1)]
    distance = lambda shape: sum(
        weight * abs(math.log(n / max(1, size))) for weight, n, size in zip(weights, shape, wanted.values(), strict=True)
    )
    for count in range(there, there - 1 if all_devices else 0, -1):
        for shape in sorted(_shapes(count, len(wanted)), key=distance):
            if suits(found := dict(zip(wanted, shape, strict=True))):
                return found
    return None


def as_flags(shape: Mapping[str, int], in_use: int) -> str:
    """Flags for this mesh, where `in_use` devices would be taken without --num-devices."""
    count = math.prod(shape.values())
    flags = [f"--mesh-{axis} {size}" for axis, size in shape.items()]
    return " ".join(flags + [f"--num-devices {count}"] * (count != in_use))


def _proposed(cfg: MeshConfig, in_use: int, suits: Suits) -> str:
    """Flags for the mesh of the devices in use that is nearest to what was asked for."""
    fixed = math.prod(size for size in cfg.axes.values() if size != -1)
    wanted = {axis: max(1, in_use // fixed) if size == -1 else size for axis, size in cfg.axes.items()}
    shape = nearest_shape(wanted, in_use, suits)
    return "" if shape is None else f"; try {as_flags(shape, cfg.num_devices or 0)}"


def _fill(cfg: MeshConfig, count: int, suits: Suits) -> tuple[int, ...]:
    """The mesh shape with -1 replaced by what is left of `count` devices."""
    sizes = list(cfg.axes.values())
    if -1 in sizes:
        fixed = math.prod(s for s in sizes if s != -1)
        if count % fixed:
            proposed = _proposed(cfg, count, suits)
            raise ConfigError(f"mesh {cfg}: {fixed} does not divide the {count} devices in use, so -1 has no value{proposed}")
        sizes[sizes.index(-1)] = count // fixed
    return tuple(sizes)


def mesh_shape(cfg: MeshConfig, platform: str, there: int, suits: Suits = lambda _: True) -> tuple[int, ...]:
    """The shape of the mesh where `there` devices of this platform are; ConfigError when it does not fit them.

    Meshes that errors propose `suits` the run.
    """
    if cfg.num_devices is not None and cfg.num_devices > there:
        raise ConfigError(
            f"--num-devices {cfg.num_devices}: only {there} {platform} device(s) are here{_proposed(cfg, there, suits)}"
        )
    # The CPU has as many devices as one cares to emulate, so there the mesh itself says how many are in use; and so
    # does the default mesh anywhere: the first run of a newcomer takes one device and hears of the others.
    sizes = cfg.axes.values()
    by_mesh = (platform == "cpu" and -1 not in sizes) or set(sizes) == {1}
    in_use = cfg.num_devices or (math.prod(sizes) if by_mesh else there)
    shape = _fill(cfg, in_use, suits)
    need = math.prod(shape)
    if need != in_use:
        own = dict(zip(cfg.axes, shape, strict=True))
        as_it_is = f", or --num-devices {need}" if need <= there and suits(own) else ""
        raise ConfigError(
            f"mesh {cfg} needs {need} device(s), but {in_use} {platform} device(s) are in use"
            f"{_proposed(cfg, in_use, suits)}{as_it_is}"
        )
    if need > there:
        raise ConfigError(
            f"mesh {cfg} needs {need} devices, but JAX already runs with {there} cpu device(s); build the mesh "
            f"before any other JAX call, or set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        )
    return shape


def make_mesh(cfg: MeshConfig, suits: Suits = lambda _: True) -> Mesh:
    """Joins the other processes, chooses the platform and its devices and lays them out."""
    devices = _pick_devices(cfg)
    shape = mesh_shape(cfg, devices[0].platform, len(devices), suits)
    if jax.process_count() > 1 and math.prod(shape) != len(devices):
        raise ConfigError(
            f"mesh {cfg} uses {math.prod(shape)} of the {len(devices)} devices of "
            f"{jax.process_count()} processes, and all of them must be in it; set --mesh-data -1 to take the rest"
        )
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(cfg.axes), axis_types=kinds, devices=devices[: math.prod(shape)])


def describe(mesh: Mesh) -> str:
    """`8 x cpu, mesh 2x2x2 (data x fsdp x tp)`: the first line of a run. One device is no mesh."""
    device = mesh.devices.flat[0]
    shape = "x".join(map(str, mesh.shape.values()))
    count = len({d.process_index for d in mesh.devices.flat})
    split = f", mesh {shape} ({' x '.join(mesh.axis_names)})" if mesh.size > 1 else ""
    text = f"{mesh.size} x {device.device_kind}{f' in {count} processes' * (count > 1)}{split}"
    idle = 0 if device.platform == "cpu" else len(_found(device.platform)) - mesh.size
    return text + (f"; {idle} more are idle: --mesh-data -1 takes them" if idle > 0 else "")


def misfits(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> list[Length]:
    """Every size that its mesh axes do not divide."""
    data = cfg.data
    of_data = [Length("batch", data.batch_size, "--batch-size"), Length("time_split", data.seq_len, "--seq-len")]
    return [length for length in (*of_data, *cfg.model.lengths()) if length.size % _ways(length, mesh_shape)]


def check_fit(cfg: RunConfig, mesh_shape: Mapping[str, int], *, model_is_given: bool = False) -> None:
    """ConfigError that names every size that its mesh axes do not divide, with settings that work.

    `model_is_given`: no flag changes this model, so only another mesh or batch is proposed.
    """
    if not (found := misfits(cfg, mesh_shape)):
        return
    names: dict[str, list[str]] = {}
    for length in found:
        over = f"{' x '.join(RULES[length.axis])} = {_ways(length, mesh_shape)}"
        names.setdefault(over, []).append(f"{length.flag} {length.size}")
    (over, first), *others = ((over, _listed(sizes)) for over, sizes in names.items())
    rest = "".join(f", {sizes} over {over}" for over, sizes in others)
    remedies = []
    smaller = nearest_shape(
        mesh_shape,
        math.prod(mesh_shape.values()),
        lambda shape: not misfits(cfg, shape),
        all_devices=jax.distributed.is_initialized(),
    )
    if smaller is not None:
        remedies.append(as_flags(smaller, math.prod(mesh_shape.values())))
    if not model_is_given and (resized := _resized(cfg, found, mesh_shape)) is not None:
        remedies.append(resized)
    if not remedies:
        remedies.append("another size: no mesh of all devices divides them")
    raise ConfigError(f"{first} cannot be split over {over}{rest}; try {', or '.join(remedies)}")


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`"""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def _ways(length: Length, mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[axis] for axis in RULES[length.axis])


def _resized(cfg: RunConfig, found: list[Length], mesh_shape: Mapping[str, int]) -> str | None:
    """Flags with which all sizes divide and the configuration is still a valid one; None where there are none."""
    by_flag = {key.flag: key for key in keys(cfg.model_kind).values()}
    values, wanted = cfg.to_dict(), dict[str, int]()
    if cfg.train.init_from is not None or cfg.train.resume_from is not None:
        found_in_data = [length for length in found if length.flag in ("--batch-size", "--seq-len")]
        if found_in_data != found:
            return None  # the weights that the run starts from have these sizes
    for length in found:
        if length.flag not in by_flag or (length.axis == "time_split" and Path(cfg.data.dataset).is_dir()):
            return None  # rows of a prepared folder have the length that they have
        wanted |= _nearest(cfg.model, length, _ways(length, mesh_shape), by_flag[length.flag].of(values))
    for flag, size in wanted.items():
        section, _, name = by_flag[flag].path.rpartition(".")
        values[section][name] = size
    try:
        fits = not misfits(RunConfig.from_dict(values), mesh_shape)
    except ConfigError:
        return None
    return " ".join(f"{flag} {size}" for flag, size in wanted.items()) if fits else None


def _nearest(model: ArchitectureConfig, length: Length, ways: int, value: int) -> dict[str, int]:
    """Flags with which this size divides; `value` is what its own flag is set to."""
    axis, size, flag = length
    if axis == "vocab":  # upwards, so that the tokenizer still fits; the model pads it to a multiple of 128
        unit = math.lcm(128, ways)
        return {flag: -(-size // unit) * unit}
    of = {other.axis: other.size for other in model.lengths()}
    if axis not in ("heads", "kv_heads") or "kv_heads" not in of:
        # Rows hold whole coarse blocks; a size may be a share of what its flag sets.
        unit = math.lcm(ways, model.alignment) if axis == "time_split" else ways * (value // size)
        return {flag: nearest_multiple(value, unit)}
    heads = nearest_multiple(of["heads"], ways)
    shared = [k for k in range(ways, heads + 1, ways) if heads % k == 0]
    kv_heads = {"--model-kv-heads": min(shared, key=lambda k: abs(k - of["kv_heads"]))}
    return {flag: heads} | kv_heads if axis == "heads" else kv_heads
