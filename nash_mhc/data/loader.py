"""Rows -> batches, through grain. Step k has the same rows for any number of processes, workers and restarts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.pack import Rows, RowSource
from nash_mhc.data.workers import begin_worker, starting_workers


class Steps:
    """Map step k to its rows, [grad_accum, batch_size / shares, T]; grain reads steps in any order."""

    def __init__(self, source: RowSource, batch_size: int, grad_accum: int, seed: int, share: tuple[int, int]) -> None:
        self._source, self._rows, self._microbatches = source, batch_size * grad_accum, grad_accum
        self._seed, self._share = seed, share

    def __len__(self) -> int:
        return sys.maxsize // self._rows

    def __getitem__(self, step: int) -> Rows:
        share, shares = self._share
        # Row i of a step belongs to share i mod shares, so each microbatch has the same rows for any number of shares.
        positions = int(step) * self._rows + np.arange(share, self._rows, shares)
        indices = self._source.rows_at(positions, self._seed)
        rows = self._source.take(indices)
        check_weights(rows.weights, self._source.name, indices)
        return type(rows)(*(a.reshape(self._microbatches, -1, *a.shape[1:]) for a in rows))


def batches(
    source: RowSource,
    *,
    batch_size: int,
    grad_accum: int,
    seed: int,
    start_step: int = 0,
    stop_step: int | None = None,
    workers: int = 0,
    buffer: int = 4,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Rows]:
    """Yield batches [grad_accum, batch_size / shares, T] from `start_step` to `stop_step`, or forever.

    `share` is (k, n): only the k-th of n shares of every batch is read, for one process.
    """
    steps = Steps(source, batch_size, grad_accum, seed, share)
    # Small steps are read faster than threads switch; large ones may wait for a disk.
    threads = 2 if batch_size * grad_accum >= 32 and not workers else 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    # Without the stop, workers would leave unread batches in shared memory.
    ds: Any = grain.MapDataset.source(steps)[start_step:stop_step].to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain's workers read absl's flags, which only an absl program parses
            flags.FLAGS.mark_as_parsed()
        worker_options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)
        ds = ds.mp_prefetch(worker_options, begin_worker)
    iterator: Any = iter(ds)
    if workers:
        with starting_workers():
            iterator.get_state()  # makes grain create its workers now, in this thread
            iterator.start_prefetch()
    try:
        for rows in iterator:
            batch = type(rows)(*(np.array(a) for a in rows)) if workers else rows
            # grain frees shared memory in a thread: drop it before the step, or the end of the run may come first.
            del rows
            yield batch
    finally:
        getattr(iterator, "close", lambda: None)()


def check_weights(weights: np.ndarray, name: str, indices: Sequence[int] | np.ndarray) -> None:
    """Raise ConfigError for negative weights [B, T]: training would unlearn those targets."""
    if (weights < 0).any():
        row, slot = np.argwhere(weights < 0)[0]
        weight = f"{weights[row, slot]:g} in slot {slot}"
        raise ConfigError(f"{name}: row {int(indices[row])} has the weight {weight}; weights must be at least 0")


def count_bytes(rows: Rows, byte_lengths: np.ndarray) -> int:
    """Return the bytes of text of a batch's targets."""
    return int((byte_lengths[rows.targets] * (rows.weights > 0)).sum())
