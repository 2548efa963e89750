"""`bench quality`: train variants of the run's model on the same data, each at its best learning rate, and compare."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from nash_mhc.bench.findings import Figures, compare, verdict
from nash_mhc.bench.step import read_late, settings_of
from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, ModelConfig, RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.data.sources import RowSource, loss_floor, open_held_out, open_source
from nash_mhc.data.tokenizer import Tokenizer, load_tokenizer
from nash_mhc.model.architectures import count_parameters, for_platform
from nash_mhc.model.lm import LM
from nash_mhc.train.device_batches import abstract_batch, host_batches, prefetched
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import ProgramKey, create_state, sharded_abstract_state
from nash_mhc.train.step import compile_train_step

log = logging.getLogger(__name__)

# The changes of each variant to the run's model. Dense attention has no window, its best form.
_DENSE: dict[str, Any] = {"scales": 1, "window": None, "full_every": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "nash-mhc": {},
    "dense": {**_DENSE, "conv_taps": 0, "residual": "plain"},
    "dense-mhc": {**_DENSE, "conv_taps": 0},
    "dense-conv-mhc": _DENSE,
    "dense-conv": {**_DENSE, "residual": "plain"},
    "multiscale-plain": {"residual": "plain"},
}
_TOLERANCE = 0.03  # relative difference in parameters


def parse_variants(names: str) -> list[str]:
    """Parse `dense,nash-mhc` into distinct variants. Raise ConfigError for an unknown name."""
    variants = list(dict.fromkeys(name.strip().lower() for name in names.split(",")))
    for name in variants:
        if name not in VARIANTS:
            hint = did_you_mean(name, VARIANTS) or f"; choose from {', '.join(VARIANTS)}"
            raise ConfigError(f"--variants: unknown variant {name!r}{hint}")
    return variants


def base_model(model: ArchitectureConfig) -> ModelConfig:
    """Return the run's model. Raise ConfigError for another architecture."""
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"bench quality supports only --model-kind {ModelConfig.architecture}, not {model.architecture}")
    return model


def match_parameters(model: ModelConfig, parameters: int, unit: int) -> ModelConfig:
    """Set the FFN width, a multiple of `unit`, that brings the model closest to this number of parameters."""
    at = lambda ffn: count_parameters(dataclasses.replace(model, ffn=ffn))
    slope = at(2 * unit) - at(unit)  # every unit of width adds the same
    return dataclasses.replace(model, ffn=unit * max(1, 1 + round((parameters - at(unit)) / slope)))


def variant(name: str, model: ModelConfig, tp: int) -> ModelConfig:
    """Return the variant of the model with the nearest number of parameters that divides over `tp`."""
    if not VARIANTS[name]:
        return model
    target = count_parameters(model)
    model = match_parameters(dataclasses.replace(model, **VARIANTS[name]), target, math.lcm(8, tp))
    if abs((count := count_parameters(model)) / target - 1) > _TOLERANCE:
        raise ConfigError(
            f"variant {name}: no FFN width gives {target:,} parameters within {_TOLERANCE:.0%} (the nearest, {model.ffn}, "
            f"gives {count:,}); use a larger model or a smaller --mesh-tp"
        )
    return model


_NEAREST = 16  # tokens: the first bucket of positions; each later one is twice as wide


class _Progress:
    """A status line on a terminal, occasional lines elsewhere; on stderr, as stdout is for the results."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._last = time.monotonic()
        self.status = self._console.status("")

    def now(self, text: str) -> None:
        self.status.update(text)
        if not self._console.is_terminal and time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            log.info(text)


@dataclass
class Setting:
    """The settings that all variants share."""

    tokenizer: Tokenizer
    mesh: Mesh
    align: int  # alignment of documents, for the coarsest model
    held_out: RowSource
    progress: _Progress


@dataclass
class Trained:
    model: LM
    held_out: float  # loss; infinite for a diverged run
    tokens_per_s: float
    health: dict[str, Any]  # of the last step


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None  # JSON has no NaN: None stands for a diverged run


def by_position(model: LM, evaluator: Evaluator, seq_len: int) -> dict[str, float]:
    """Return the loss by position in the sequence."""
    losses = {}
    edges = [0, *itertools.takewhile(lambda edge: edge < seq_len, (_NEAREST << i for i in itertools.count())), seq_len]
    for low, high in itertools.pairwise(edges):

        def within(rows: Rows, low: int = low, high: int = high) -> np.ndarray:
            at = np.arange(seq_len)
            return (at >= low) & (at < high)

        loss = evaluator.evaluate(model, only=within)["eval/loss"]
        if math.isfinite(loss):
            losses[f"{low} to {high - 1}"] = loss
    return losses


class Contestant:
    """One variant: compiled once, trained with every learning rate, and with the best one for every seed."""

    def __init__(self, name: str, cfg: RunConfig, setting: Setting) -> None:
        self.name, self.cfg, self._setting = name, cfg, setting
        log.info(f"{name}: {count_parameters(cfg.model):,} parameters, ffn {base_model(cfg.model).ffn}; compiling ...")
        setting.progress.status.update(f"{name}: compiling ...")
        step_fn = compile_train_step(cfg, setting.mesh, self._source(cfg.train.seed))
        step_fn.compile(sharded_abstract_state(cfg, setting.mesh), abstract_batch(cfg.data, cfg.train.grad_accum, setting.mesh))
        self._evaluator = Evaluator(
            ProgramKey.of(cfg), setting.held_out, setting.tokenizer, setting.mesh, batch_size=cfg.data.batch_size,
            batches=cfg.train.eval_batches,
        )  # fmt: skip
        self.figures: Figures = {
            "parameters": count_parameters(cfg.model),
            **{key: getattr(cfg.model, key) for key in ("ffn", "scales", "window", "full_every", "conv_taps", "residual")},
            "attention": cfg.train.attention,
            "compile_s": step_fn.seconds,
        }

    def _source(self, seed: int) -> RowSource:
        data = self.cfg.data
        return open_source(data, self._setting.tokenizer, split=data.split, seed=seed, align=self._setting.align)

    def train(self, seed: int, *, rate: float | None = None, steps: int | None = None) -> Trained:
        """Train from random weights and evaluate, with another rate and length if given."""
        setting, mesh, optim = self._setting, self._setting.mesh, self.cfg.optim
        total = self.cfg.train.total_steps if steps is None else steps
        optim = dataclasses.replace(
            optim,
            learning_rate=optim.learning_rate if rate is None else rate,
            warmup_steps=optim.warmup_steps if steps is None else min(optim.warmup_steps, steps - 1),
        )
        cfg = dataclasses.replace(
            self.cfg, optim=optim, train=dataclasses.replace(self.cfg.train, seed=seed, total_steps=total)
        )
        where = f"{self.name}, rate {cfg.optim.learning_rate:g}, seed {seed}"
        source = self._source(seed)
        # Learning rate, schedule and seed are arguments of the program: all runs of a variant share one.
        step_fn = compile_train_step(cfg, mesh, source)
        state, metrics = create_state(cfg, mesh), dict[str, Any]()
        rows = host_batches(cfg.data, source, mesh, grad_accum=cfg.train.grad_accum, seed=seed)

        def take_steps() -> Iterator[Any]:
            nonlocal state, metrics
            for batch in prefetched(itertools.islice(rows, total), mesh):
                state, metrics = step_fn(state, batch)
                yield metrics["loss"]

        times = [time.perf_counter()]
        try:
            for step, (loss, read_at) in enumerate(read_late(take_steps()), start=1):
                times.append(read_at)
                setting.progress.now(f"{where}: step {step}/{total}, loss {loss:.4f}")
        finally:
            rows.close()
        began = times[min(1, total - 1)]  # the first step also waited for the first batch
        tokens = cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
        speed = max(total - 1, 1) * tokens / (times[-1] - began)
        last = {k.removeprefix("health/"): v for k, v in jax.device_get(metrics).items() if k.startswith("health/scale")}
        health = {name: value.tolist() for name, value in last.items() if np.isfinite(value).all()}

        setting.progress.status.update(f"{where}: evaluating ...")
        loss = self._evaluator.evaluate(state.model)["eval/loss"]
        log.info(f"{where}: held-out loss {loss:.4f} after {total} steps, {speed:,.0f} tok/s")
        return Trained(state.model, loss if math.isfinite(loss) else math.inf, speed, health)

    def compete(self, rates: list[float], seeds: list[int]) -> None:
        """Train with every learning rate and the first seed, then with the best rate and the other seeds."""
        losses: dict[float, float] = {}
        speeds: list[float] = []
        best: Trained | None = None
        for rate in rates:
            trained = self.train(seeds[0], rate=rate)
            losses[rate] = trained.held_out
            speeds.append(trained.tokens_per_s)
            if best is None or trained.held_out < best.held_out:
                best = trained
            del trained  # hold the weights of at most two runs
        assert best is not None
        rate = min(rates, key=lambda rate: losses[rate])
        positions = by_position(best.model, self._evaluator, self.cfg.data.seq_len)
        self.cfg = dataclasses.replace(self.cfg, optim=dataclasses.replace(self.cfg.optim, learning_rate=rate))
        health = best.health
        del best
        held_out = [losses[rate], *(self.train(seed).held_out for seed in seeds[1:])]
        inside = len(rates) > 2 and rate not in (min(rates), max(rates))
        self.figures |= {
            "rates": {f"{rate:g}": _finite(loss) for rate, loss in losses.items()},
            "learning_rate": rate,
            "at_edge": None if len(rates) == 1 else not inside,
            "held_out": [_finite(loss) for loss in held_out],
            "tokens_per_s": statistics.median(speeds),
            "loss_by_position": positions,
            **health,
        }

    def train_for_seconds(self, seconds: float, seed: int) -> None:
        """Train for as many steps as fit into that time, with a schedule of that length."""
        tokens = self.cfg.train.grad_accum * self.cfg.data.batch_size * self.cfg.data.seq_len
        steps = max(1, min(self.cfg.train.total_steps, round(seconds * self.figures["tokens_per_s"] / tokens)))
        whole = steps == self.cfg.train.total_steps
        loss = self.figures["held_out"][0] if whole else _finite(self.train(seed, steps=steps).held_out)
        self.figures["equal_seconds"] = {"seconds": seconds, "steps": steps, "held_out": loss}


def parse_learning_rates(text: str | None, default: float) -> list[float]:
    """Parse `1e-3,2e-3` into sorted learning rates; return `default` if there is no text."""
    if text is None:
        return [default]
    try:
        rates = sorted({float(rate) for rate in text.split(",")})
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--learning-rates {text} must be comma-separated numbers above 0, such as 1e-3,2e-3,4e-3") from None
    return rates


def bench_quality(
    cfg: RunConfig,
    *,
    variants: str,
    seeds: int,
    eval_rows: int | None = None,
    learning_rates: str | None = None,
) -> Figures:
    """Check everything, then train and compare the variants, one at a time."""
    names, model, B = parse_variants(variants), base_model(cfg.model), cfg.data.batch_size
    if seeds < 1 or (eval_rows is not None and eval_rows < 1):
        raise ConfigError("--seeds and --eval-rows must be at least 1")
    rates = parse_learning_rates(learning_rates, cfg.optim.learning_rate)
    if model.scales == 1 or model.residual == "plain":
        raise ConfigError("bench quality needs the full model: --model-scales above 1 and --model-residual mhc or mhc-layer")
    base, mesh = resolve(cfg)
    tokenizer = load_tokenizer(cfg.data.tokenizer, begin_with_end=cfg.data.begin_with_end)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(f"--tokenizer {cfg.data.tokenizer}: set --model-vocab-size {tokenizer.vocab_size} or more")
    align, run_seeds = model.alignment, [cfg.train.seed + i for i in range(seeds)]
    dataclasses.replace(cfg.train, seed=run_seeds[-1])  # raises for a seed that is too large
    # Four times the batches of a run's evaluation, for a precision of half a percent.
    batches = 4 * cfg.train.eval_batches if eval_rows is None else -(-eval_rows // B)
    held_out = open_held_out(cfg.data, tokenizer, align=align)
    if held_out is None:
        raise ConfigError("no held-out data to compare the models on; raise --validation-fraction")
    runs: dict[str, RunConfig] = {}
    for name in names:
        # Choose the kernel again: the best one with a window may not be the best without.
        train_config = dataclasses.replace(base.train, attention=cfg.train.attention, eval_batches=batches)
        run = dataclasses.replace(base, model=variant(name, model, mesh.shape["tp"]), train=train_config)
        runs[name] = for_platform(run, base.mesh.platform)
    progress = _Progress()
    setting = Setting(tokenizer, mesh, align, held_out, progress)
    contestants = []
    with progress.status:
        for name in names:
            contestants.append(Contestant(name, runs[name], setting))
            contestants[-1].compete(rates, run_seeds)
        tokens = cfg.train.total_steps * cfg.train.grad_accum * B * cfg.data.seq_len
        seconds = tokens / max(c.figures["tokens_per_s"] for c in contestants)
        for contestant in contestants if len(contestants) > 1 else []:
            contestant.train_for_seconds(seconds, run_seeds[0])
    measured = {c.name: c.figures for c in contestants}
    compare(measured)
    floor = floors[0] if (floors := loss_floor(cfg.data, tokenizer)) else None
    below, text = verdict(measured, floor)
    return settings_of(base, mesh) | {
        "steps": cfg.train.total_steps, "dataset": cfg.data.dataset,
        "align": align, "seeds": run_seeds,
        "eval_rows": min(batches * B, len(held_out)), "floor_nats_per_token": floor,
        "variants": measured, "nash_below_dense": below, "verdict": text,
    }  # fmt: skip
