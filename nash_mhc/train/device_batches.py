"""Batches on the devices: host arrays become sharded arrays, a few steps ahead of their use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from nash_mhc.config.schema import ConfigError, DataConfig
from nash_mhc.data.loader import batches
from nash_mhc.data.pack import Extras, Rows
from nash_mhc.data.sources import RowSource
from nash_mhc.objectives.base import Batch
from nash_mhc.parallel.sharding import RULES, named_sharding


def batch_sharding(mesh: Mesh, axes: int = 3) -> NamedSharding:
    """Return the sharding of a batch array [accumulation, batch, time, ...] with this number of axes."""
    return named_sharding(mesh, "parts", "batch", *("time",) * (axes - 2))


def to_device(rows: Rows, mesh: Mesh) -> Batch:
    """Start to transfer this process's share of a batch, and return the global batch at once.

    Fields after the first four become extras.
    """
    with jax.transfer_guard_host_to_device("allow"):  # with several processes, JAX takes this explicit transfer as implicit
        arrays = [jax.make_array_from_process_local_data(batch_sharding(mesh, a.ndim), a) for a in rows]
    inputs, targets, segments, weights, *others = arrays
    return Batch(inputs, targets, segments, weights, dict(zip(rows._fields[4:], others, strict=True)))


def share_of_batch(mesh: Mesh) -> tuple[int, int]:
    """Return (k, n): this process reads the k-th of n equal shares of every batch.

    There is one share per process, unless tp spans processes: those with the same sequences read the same share.
    """
    split = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    held: dict[int, set[int]] = {}
    indices: Any = batch_sharding(mesh).devices_indices_map((1, split, 1))
    for device, index in indices.items():
        held.setdefault(device.process_index, set()).add(index[1].indices(split)[0])
    shares = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, shares)) != split:
        tp = mesh.shape["tp"]
        raise ConfigError(
            f"--mesh-tp {tp}: processes would read overlapping parts of a batch; use a divisor of the number of devices per "
            "process"
        )
    return shares.index(tuple(sorted(held[jax.process_index()]))), len(shares)


def own_rows(rows: Rows, mesh: Mesh) -> Rows:
    """Return this process's share of a whole batch [accumulation, batch, time]."""
    share, shares = share_of_batch(mesh)
    return type(rows)(*(np.split(a, shares, axis=1)[share] for a in rows))


def abstract_batch(cfg: DataConfig, grad_accum: int, mesh: Mesh, extras: Extras | None = None) -> Batch:
    """Return a batch of shapes and shardings, to compile before data is read; `extras` as in `RowSource`."""

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
) -> Generator[Rows, None, None]:
    """Yield this process's share of each batch, from `start_step` on, as host arrays."""
    yield from batches(
        source, batch_size=cfg.batch_size, grad_accum=grad_accum, seed=seed, start_step=start_step, stop_step=stop_step,
        workers=cfg.num_workers, buffer=cfg.worker_buffer_size, share=share_of_batch(mesh),
    )  # fmt: skip


def prefetched(
    rows: Iterator[Rows], mesh: Mesh, add_extras: Callable[[Batch], Batch] = lambda batch: batch, depth: int = 2
) -> Generator[Batch, None, None]:
    """Yield batches on the devices, with `depth` of them in transfer, so that a step never waits for a transfer."""
    queue: deque[Batch] = deque()
    for row in rows:
        queue.append(to_device(row, mesh))
        if len(queue) > depth:
            yield add_extras(queue.popleft())
    yield from map(add_extras, queue)
