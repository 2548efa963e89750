"""Rows -> batches, through grain. Step k holds the same rows however many processes, workers or restarts there were."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from nash_mhc.config.schema import ConfigError
from nash_mhc.data.order import shuffled
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import RowSource
from nash_mhc.data.workers import begin_worker, starting_workers


class Steps:
    """Step k -> its rows, [grad_accum, batch_size / shares, T]: what grain's readers ask for, in whatever order."""

    def __init__(self, source: RowSource, batch_size: int, grad_accum: int, seed: int, share: tuple[int, int]) -> None:
        self._source, self._rows, self._parts = source, batch_size * grad_accum, grad_accum
        self._seed, self._share = seed, share

    def __len__(self) -> int:
        return sys.maxsize // self._rows

    def __getitem__(self, step: int) -> Rows:
        share, shares = self._share
        # Row i of the step is in share i mod shares, so that each forward pass has the rows it should.
        positions = int(step) * self._rows + np.arange(share, self._rows, shares)
        indices = positions if self._source.endless else shuffled(positions, len(self._source), seed=self._seed)
        rows = self._source.take(indices)
        check_weights(rows.weights, self._source.name, indices)
        return type(rows)(*(a.reshape(self._parts, -1, *a.shape[1:]) for a in rows))


def _begin_worker(_: int, __: int) -> None:
    """By grain: the number of the worker, and how many there are."""
    begin_worker()


def _mark_absl_flags_as_parsed() -> None:
    """Let grain's workers read absl's flags, which only an absl program parses."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


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
    """Batches [grad_accum, batch_size / shares, T] from `start_step` on, up to `stop_step` or for ever; the position is
    that one number. Workers make nothing that comes after the stop: it would lie in shared memory, and nobody take it.

    `share` is (k, n): only the k-th of n shares of every batch is read, that of one process.
    """
    steps = Steps(source, batch_size, grad_accum, seed, share)
    # Small steps are read faster than threads take turns; large ones may have to wait for a disk.
    threads = 2 if batch_size * grad_accum >= 32 and not workers else 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    ds: Any = grain.MapDataset.source(steps)[start_step:stop_step].to_iter_dataset(options)
    if workers:
        _mark_absl_flags_as_parsed()
        ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer), _begin_worker)
    iterator: Any = iter(ds)
    if workers:
        with starting_workers():
            iterator.get_state()  # has grain make its readers here and now, and not one by one in threads of its own
            iterator.start_prefetch()
    try:
        for rows in iterator:
            # Out of the memory that is shared with a worker: grain gives it back in a thread of its own, some time
            # after nobody holds it any more, and a run that ends just then would leave it behind.
            yield type(rows)(*(np.array(a) for a in rows)) if workers else rows
    finally:
        getattr(iterator, "close", lambda: None)()


def check_weights(weights: np.ndarray, name: str, indices: Sequence[int] | np.ndarray) -> None:
    """ConfigError for rows [B, T] of a source that count less than nothing: training would unlearn them."""
    if (weights < 0).any():
        row, slot = np.argwhere(weights < 0)[0]
        raise ConfigError(
            f"{name}: row {int(indices[row])} has the weight {weights[row, slot]:g} in slot {slot}; weights must be at least 0"
        )


def count_bytes(rows: Rows, byte_lengths: np.ndarray) -> int:
    """Bytes of text that the targets of a batch stand for."""
    return int((byte_lengths[rows.targets] * (rows.weights > 0)).sum())
