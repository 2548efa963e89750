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
from nash_mhc.data.pack import AnyRows, Rows, Taught
from nash_mhc.data.sources import RowSource
from nash_mhc.objectives.base import Batch
from nash_mhc.ops.distill import Teacher
from nash_mhc.parallel.sharding import RULES, named


def batch_sharding(mesh: Mesh, axes: int = 3) -> NamedSharding:
    """Of an array [accumulation, batch, time], or of one with what a teacher knows of every time."""
    return named(mesh, *("parts", "batch", "time", "candidates")[:axes])


def to_device(rows: Rows | Taught, mesh: Mesh) -> Batch:
    """Starts the transfer and returns at once; each process brings its own rows."""
    with jax.transfer_guard_host_to_device("allow"):  # asked for by name, but with several processes JAX does not see that
        arrays = [jax.make_array_from_process_local_data(batch_sharding(mesh, a.ndim), a) for a in rows]
    inputs, targets, segments, weights, *known = arrays
    return Batch(inputs, targets, segments, weights, Teacher(*known) if known else None)


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


def abstract_batch(cfg: DataConfig, grad_accum: int, mesh: Mesh, top_k: int | None = None) -> Batch:
    """The batch's shapes and shardings, to compile for before any data is there; `top_k`: with so much of a teacher."""
    shape = (grad_accum, cfg.batch_size, cfg.seq_len)

    def array(dtype: str, *more: int) -> Any:
        return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=batch_sharding(mesh, 3 + len(more)))

    teacher = None if top_k is None else Teacher(array("int32", top_k), array("float16", top_k), array("float32"))
    return Batch(array("int32"), array("int32"), array("int32"), array("float32"), teacher)


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
    """Batches on the devices, `depth` of them in flight, so that a step never waits for a transfer; `change` is done to
    each of them there."""
    queue: deque[Batch] = deque()
    for row in rows:
        queue.append(to_device(row, mesh))
        if len(queue) > depth:
            yield change(queue.popleft())
    yield from map(change, queue)
