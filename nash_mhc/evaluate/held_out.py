"""Evaluations that need nothing from elsewhere: the built-in stories, the run's own held-out rows, any text file."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ConfigError, RunConfig, TrainConfig
from nash_mhc.data.pack import RowSource
from nash_mhc.data.sources import loss_floor, open_held_out
from nash_mhc.data.tokenizer import prefix_of
from nash_mhc.evaluate.names import HELD_OUT, STORIES
from nash_mhc.evaluate.progress import Progress
from nash_mhc.evaluate.scoring import Scorer, row_unit, windows
from nash_mhc.hub.load import Loaded
from nash_mhc.train.evaluate import Evaluator

_LONGEST = 2048  # tokens of a row of stories, for models from elsewhere, which may see a hundred times as many


def stories(
    loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """What training reports of its held-out stories: the same rows, where as many are read (`limit`: how many).

    `floor` is what no model can be below, where that is known; `ratio` the loss as a multiple of it.
    """
    progress = progress or Progress(quiet=True)
    own, unit = loaded.config, row_unit(loaded.config.model.alignment, mesh)
    rows = limit or own.train.eval_batches * own.data.batch_size
    longest = own.data.seq_len if loaded.step else min(own.data.seq_len, _LONGEST)
    data = dataclasses.replace(
        own.data, dataset=STORIES, dataset_name=None, eval_split="validation", streaming=False, batch_size=batch_size,
        seq_len=max(longest // unit * unit, unit),
    )  # fmt: skip
    train = TrainConfig(dtype=loaded.dtype, eval_batches=-(-rows // batch_size))
    cfg = RunConfig(model=own.model, data=data, train=train)
    held_out = open_held_out(data, loaded.tokenizer, align=own.model.alignment)
    assert held_out is not None  # of stories there are always more
    return _measured(STORIES, cfg, held_out, loaded, mesh, progress)


def of_the_run(
    loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """What a run holds out of its own data, by its own objective; as many rows as its evaluations read, or `limit`."""
    own = loaded.config
    if not loaded.step:
        raise ConfigError(f"--tasks {HELD_OUT}: this is no run of ours, which would know its data; name stories or bytes:FILE")
    if own.reads_cache or own.distill.teacher is not None:
        raise ConfigError(f"--tasks {HELD_OUT}: a distilled run's rows need its teacher; name stories or bytes:FILE")
    rows = limit or own.train.eval_batches * own.data.batch_size
    data = dataclasses.replace(own.data, batch_size=batch_size)
    train = TrainConfig(dtype=loaded.dtype, eval_batches=-(-rows // batch_size))
    held_out = open_held_out(data, loaded.tokenizer, align=own.model.alignment)
    if held_out is None:
        raise ConfigError(f"--tasks {HELD_OUT}: this run holds nothing out of {own.data.dataset} (--validation-fraction 0)")
    cfg = RunConfig(model=own.model, data=data, train=train, objective=own.objective)
    return _measured(HELD_OUT, cfg, held_out, loaded, mesh, progress or Progress(quiet=True))


def _measured(
    name: str, cfg: RunConfig, held_out: RowSource, loaded: Loaded, mesh: Mesh, progress: Progress
) -> dict[str, float]:
    evaluator = Evaluator(cfg, held_out, loaded.tokenizer, mesh)
    progress.say(f"compiling for rows of {cfg.data.seq_len:,} tokens ...")
    with progress.part(name, evaluator.batches) as tick:
        begun = iter(range(evaluator.batches + 1))

        def each_batch() -> bool:
            tick(1 if next(begun) else 0)  # asked before every batch, and once more at the end
            return False

        found = evaluator.evaluate(loaded.model, each_batch)
    figures = {name.removeprefix("eval/"): value for name, value in found.items()}
    if (floor := loss_floor(cfg.data, loaded.tokenizer)) is not None:
        figures |= {"floor": floor[0], "ratio": figures["loss"] / floor[0]}
    return figures


def text_file(
    name: str, text: str, loaded: Loaded, scorer: Scorer, *, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """Bits a byte of a text, each token scored once.

    Rows overlap by half, so that a token sees at least half of what the model can see, or all that is before it.
    `limit`: how many rows.
    """
    progress = progress or Progress(quiet=True)
    tokens = loaded.tokenizer.encode(text)
    rows = list(windows(tokens.tolist(), prefix_of(loaded.tokenizer), scorer.longest, max(scorer.longest // 2, 1)))
    some = rows[:limit]
    with progress.part(name, len(some)) as tick:
        nats = -math.fsum(score.log_prob for score in scorer.score(some, tick))
    count = sum(len(row.continuation) for row in some)
    # The whole file has the bytes that it has, whatever a tokenizer makes of them.
    size = len(text.encode("utf-8")) if len(some) == len(rows) else int(np.sum(loaded.tokenizer.byte_lengths[tokens[:count]]))
    return {"bits_per_byte": nats / math.log(2) / max(size, 1), "loss": nats / count, "tokens": count}
