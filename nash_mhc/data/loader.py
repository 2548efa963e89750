"""Rows -> batches, through grain. Step k holds the same rows however many processes, workers or restarts there were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import RowSource


def batches(
    source: RowSource,
    *,
    batch_size: int,
    grad_accum: int,
    seed: int,
    start_step: int = 0,
    workers: int = 0,
    buffer: int = 4,
    process: tuple[int, int] = (0, 1),
) -> Iterator[Rows]:
    """Batches [grad_accum, batch_size / processes, T] from `start_step` on, for ever; the position is that one number.

    `process` is (this process, all processes): each reads only its own rows.
    """
    rank, processes = process
    ds: Any = grain.MapDataset.source(source)
    if not source.endless:
        ds = ds.seed(seed).shuffle().repeat(None)
    ds = ds[start_step * batch_size * grad_accum :]
    ds = ds[rank::processes].batch(batch_size * grad_accum // processes, drop_remainder=True)
    options = grain.ReadOptions(num_threads=1 if workers else 2, prefetch_buffer_size=buffer)
    ds = ds.map(lambda rows: Rows(*(a.reshape(grad_accum, -1, a.shape[-1]) for a in rows))).to_iter_dataset(options)
    if workers:
        from absl import flags  # grain's workers read absl's flags, which only an absl program would have parsed

        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer))
    iterator = iter(ds)
    try:
        yield from iterator
    finally:
        getattr(iterator, "close", lambda: None)()


def count_bytes(rows: Rows, byte_lengths: np.ndarray) -> int:
    """Bytes of text that the targets of a batch stand for."""
    return int((byte_lengths[rows.targets] * (rows.weights > 0)).sum())
