"""Batches on their way to the devices: host rows -> sharded arrays, a few steps ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.loader import batches
from nash_mhc.data.mixture import Extras
from nash_mhc.data.pack import AnyRows, Rows, Taught
from nash_mhc.data.sources import RowSource
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.sharding import RULES, named_sharding


def batch_sharding(mesh: Mesh, axes: int = 3) -> NamedSharding:
    """Return the sharding of an array [accumulation, batch, time, ...] with so many axes."""
    return named_sharding(mesh, "parts", "batch", *("time",) * (axes - 2))


def to_device(rows: Rows | Taught, mesh: Mesh) -> Batch:
    """Start the transfer and return at once; each process brings its own share.

    Fields after the first four become extras.
    """
    with jax.transfer_guard_host_to_device("allow"):  # asked for by name, but with several processes JAX does not see that
        arrays = [jax.make_array_from_process_local_data(batch_sharding(mesh, a.ndim), a) for a in rows]
    inputs, targets, segments, weights, *others = arrays
    return Batch(inputs, targets, segments, weights, dict(zip(rows._fields[4:], others, strict=True)))


def share_of_batch(mesh: Mesh) -> tuple[int, int]:
    """(k, n): this process brings the k-th of n shares of every batch.

    As many shares as processes, unless tp reaches across processes: those that hold the same rows bring the same share.
    """
    ways = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    held: dict[int, set[int]] = {}
    places: Any = batch_sharding(mesh).devices_indices_map((1, ways, 1))
    for device, index in places.items():
        held.setdefault(device.process_index, set()).add(index[1].indices(ways)[0])
    shares = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, shares)) != ways:
        raise ConfigError("this mesh gives processes overlapping parts of a batch; let tp divide the devices of a process")
    return shares.index(tuple(sorted(held[jax.process_index()]))), len(shares)


def own_rows(rows: AnyRows, mesh: Mesh) -> AnyRows:
    """This process's share of a whole batch [parts, batch, time]."""
    share, shares = share_of_batch(mesh)
    return type(rows)(*(np.split(a, shares, axis=1)[share] for a in rows))


def abstract_batch(cfg: DataConfig, grad_accum: int, mesh: Mesh, extras: Extras | None = None) -> Batch:
    """Return the batch's shapes and shardings, to compile before the data is there; `extras` as in `RowSource`."""

    def array(dtype: str, *shape: int) -> Any:
        sharding = batch_sharding(mesh, 2 + len(shape))
        return jax.ShapeDtypeStruct((grad_accum, cfg.batch_size, *shape), dtype, sharding=sharding)

    tokens, weights = array("int32", cfg.seq_len), array("float32", cfg.seq_len)
    others = {name: array(dtype, *shape) for name, (dtype, shape) in (extras or {}).items()}
    return Batch(tokens, tokens, tokens, weights, others)


def host_batches(
    cfg: DataConfig,
    source: RowSource,
    mesh: Mesh,
    *,
    grad_accum: int,
    seed: int,
    start_step: int = 0,
    stop_step: int | None = None,
) -> Iterator[Rows | Taught]:
    return batches(
        source, batch_size=cfg.batch_size, grad_accum=grad_accum, seed=seed, start_step=start_step, stop_step=stop_step,
        workers=cfg.num_workers, buffer=cfg.worker_buffer_size, share=share_of_batch(mesh),
    )  # fmt: skip


def prefetched(
    rows: Iterator[Rows | Taught], mesh: Mesh, change: Callable[[Batch], Batch] = lambda batch: batch, depth: int = 2
) -> Iterator[Batch]:
    """Yield batches on the devices, `depth` of them in flight, so that a step never waits for a transfer.

    `change` adds extras to each of them there.
    """
    queue: deque[Batch] = deque()
    for row in rows:
        queue.append(to_device(row, mesh))
        if len(queue) > depth:
            yield change(queue.popleft())
    yield from map(change, queue)
