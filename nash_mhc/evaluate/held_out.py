"""Built-in evaluations: the synthetic stories, the run's own held-out data, any text file."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import ConfigError, DataConfig, ObjectiveConfig, RunConfig, TrainConfig
from nash_mhc.data.sources import loss_floor, open_held_out
from nash_mhc.data.tokenizer import prefix_of
from nash_mhc.evaluate.output import Progress
from nash_mhc.evaluate.scoring import Scorer, length_multiple, windows
from nash_mhc.evaluate.tasks import HELD_OUT, STORIES
from nash_mhc.hub.load import Loaded
from nash_mhc.objectives.registry import named_objective
from nash_mhc.train.evaluate import Evaluator

log = logging.getLogger(__name__)
_MAX_IMPORTED_LENGTH = 2048  # of stories for imported models, which may have much longer contexts


def stories(
    loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """Evaluate on the held-out stories that training reports, or on the first `limit` sequences.

    `floor` is the lowest possible loss, `ratio` the loss divided by it.
    """
    cfg, multiple = loaded.config, length_multiple(loaded.config.model.alignment, mesh)
    longest = cfg.data.seq_len if loaded.step else min(cfg.data.seq_len, _MAX_IMPORTED_LENGTH)
    data = dataclasses.replace(
        cfg.data, dataset=STORIES, dataset_name=None, eval_split="validation", streaming=False, batch_size=batch_size,
        seq_len=max(longest // multiple * multiple, multiple),
    )  # fmt: skip
    return _evaluate(STORIES, RunConfig().objective, data, loaded, mesh, limit, progress)


def held_out(
    loaded: Loaded, mesh: Mesh, *, batch_size: int, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """Evaluate on a run's own held-out data, by its own objective: as many sequences as in training, or `limit`."""
    cfg = loaded.config
    if not loaded.step:
        raise ConfigError(f"--tasks {HELD_OUT}: the model is not a run, so its data is unknown; use stories or bytes:FILE")
    if named_objective(cfg.objective.name).feed is not None:
        raise ConfigError(
            f"--tasks {HELD_OUT}: the run's objective {cfg.objective.name} needs batches that only training makes; use "
            "stories or bytes:FILE"
        )
    data = dataclasses.replace(cfg.data, batch_size=batch_size)
    return _evaluate(HELD_OUT, cfg.objective, data, loaded, mesh, limit, progress)


def _evaluate(
    name: str,
    objective: ObjectiveConfig,
    data: DataConfig,
    loaded: Loaded,
    mesh: Mesh,
    limit: int | None,
    progress: Progress | None,
) -> dict[str, float]:
    progress, run = progress or Progress(quiet=True), loaded.config
    source = open_held_out(data, loaded.tokenizer, align=run.model.alignment)
    if source is None:
        raise ConfigError(f"--tasks {name}: the run has no held-out part of {data.dataset} (--validation-fraction 0)")
    count = limit or run.train.eval_batches * run.data.batch_size
    train = TrainConfig(dtype=loaded.dtype, eval_batches=-(-count // data.batch_size))
    sections = tuple(section for section in run.of_kits if section.of_objective == objective.name)
    cfg = RunConfig(model=run.model, data=data, train=train, objective=objective, of_kits=sections)
    evaluator = Evaluator(cfg, source, loaded.tokenizer, mesh)
    log.info(f"compiling for sequences of {data.seq_len:,} tokens ...")
    with progress.track(name, evaluator.batches) as advance:
        batches = iter(range(evaluator.batches + 1))

        def report() -> bool:
            advance(1 if next(batches) else 0)  # called before every batch and at the end
            return False

        found = evaluator.evaluate(loaded.model, report)
    figures = {name.removeprefix("eval/"): value for name, value in found.items()}
    if (floor := loss_floor(data, loaded.tokenizer)) is not None:
        figures |= {"floor": floor[0], "ratio": figures["loss"] / floor[0]}
    return figures


def text_file(
    name: str, text: str, loaded: Loaded, scorer: Scorer, *, limit: int | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """Return the bits per byte of a text, each token scored once, or of its first `limit` windows.

    Windows overlap by half, so each token has at least half a context, or everything before it.
    """
    progress = progress or Progress(quiet=True)
    tokens = loaded.tokenizer.encode(text)
    requests = list(windows(tokens.tolist(), prefix_of(loaded.tokenizer), scorer.longest, max(scorer.longest // 2, 1)))
    selected = requests[:limit]
    with progress.track(name, len(selected)) as advance:
        nats = -math.fsum(score.log_prob for score in scorer.score(selected, advance))
    count = sum(len(request.continuation) for request in selected)
    if len(selected) == len(requests):
        size = len(text.encode("utf-8"))  # exact, even if the tokenizer normalizes text
    else:
        size = int(np.sum(loaded.tokenizer.byte_lengths[tokens[:count]]))
    return {"bits_per_byte": nats / math.log(2) / max(size, 1), "loss": nats / count, "tokens": count}
