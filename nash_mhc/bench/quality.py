"""`bench quality`: the run's model and its relatives, trained alike on the same rows with as many parameters, and scored."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from nash_mhc.config.commands import did_you_mean
from nash_mhc.config.schema import ConfigError, ModelConfig, RunConfig
from nash_mhc.data.sources import RowSource, loss_floor, open_held_out, open_source
from nash_mhc.data.tokens import Tokenizer, load_tokenizer
from nash_mhc.model.lm import LM, count_parameters
from nash_mhc.parallel.mesh import describe
from nash_mhc.train.compiled import CompiledStep
from nash_mhc.train.evaluate import Evaluator
from nash_mhc.train.feed import abstract_batch, host_batches, prefetched
from nash_mhc.train.programs import compile_train_step
from nash_mhc.train.run import for_platform, resolve
from nash_mhc.train.state import create_state, sharded_abstract_state

# What each variant changes in the run's model. Plain attention gets no window: it sees the whole row, its best form.
VARIANTS: dict[str, dict[str, Any]] = {
    "nash-mhc": {},
    "dense": {"scales": 1, "window": None, "residual": "plain"},
    "dense-mhc": {"scales": 1, "window": None},
    "multiscale-plain": {"residual": "plain"},
}
_TOLERANCE = 0.03  # of the parameters
_NOTE = "Same rows, steps and seeds for all; the FFN is as wide as equal parameters ask; plain attention has no window."

Figures = dict[str, Any]


class _Progress:
    """One line that keeps changing on a terminal, a line now and then elsewhere; on stderr, so that stdout is the result."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._last = time.monotonic()
        self.status = self._console.status("")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
        self._last = time.monotonic()

    def now(self, text: str) -> None:
        self.status.update(text)
        if not self._console.is_terminal and time.monotonic() - self._last > 10:
            self.say(text)


def chosen(names: str) -> list[str]:
    """`dense,nash-mhc` -> the variants of that name, each once; ConfigError for a name that is none."""
    found = list(dict.fromkeys(name.strip().lower() for name in names.split(",")))
    for name in found:
        if name not in VARIANTS:
            hint = did_you_mean(name, VARIANTS) or f"; there are {', '.join(VARIANTS)}"
            raise ConfigError(f"--variants: unknown variant {name!r}{hint}")
    return found


def matched(model: ModelConfig, parameters: int, unit: int) -> ModelConfig:
    """`model` with the FFN width, a multiple of `unit`, that brings it closest to so many parameters."""
    at = lambda ffn: count_parameters(dataclasses.replace(model, ffn=ffn))
    slope = at(2 * unit) - at(unit)  # every unit of width adds the same
    return dataclasses.replace(model, ffn=unit * max(1, 1 + round((parameters - at(unit)) / slope)))


def relative(name: str, cfg: RunConfig, base: RunConfig, mesh: Mesh) -> RunConfig:
    """The run of one variant. `cfg` is the run as asked for, `base` the same with the devices' own choices filled in."""
    if not VARIANTS[name]:
        return base
    target = count_parameters(cfg.model)
    model = matched(dataclasses.replace(cfg.model, **VARIANTS[name]), target, math.lcm(8, mesh.shape["tp"]))
    if abs((count := count_parameters(model)) / target - 1) > _TOLERANCE:
        raise ConfigError(
            f"variant {name}: no FFN width brings it within {_TOLERANCE:.0%} of {target:,} parameters (the nearest, "
            f"{model.ffn}, has {count:,}); take a larger model or a smaller --mesh-tp"
        )
    # The kernel is chosen anew: one that suits a window need not be the best without.
    run = dataclasses.replace(base, model=model, train=dataclasses.replace(base.train, attention=cfg.train.attention))
    return for_platform(run, base.mesh.platform)


def train(
    cfg: RunConfig, step_fn: CompiledStep, tokenizer: Tokenizer, mesh: Mesh, align: int, watch: Callable[[int, float], None]
) -> tuple[LM, float]:
    """(the trained model, tokens a second): a run from fresh weights to its last step; seed and `align` fix its rows."""
    total, seed = cfg.train.total_steps, cfg.train.seed
    state = create_state(cfg, mesh)
    source = open_source(cfg.data, tokenizer, split=cfg.data.split, seed=seed, align=align)
    rows = host_batches(cfg.data, source, mesh, grad_accum=cfg.train.grad_accum, seed=seed)
    began, metrics = time.perf_counter(), None
    try:
        for step, batch in enumerate(prefetched(itertools.islice(rows, total), mesh), start=1):
            before = metrics
            state, metrics = step_fn(state, batch)
            if before is not None:  # read one step late: the host never waits for the newest
                watch(step - 1, float(before["loss"]))
            if step == 2:  # the first step also waited for the first rows
                began = time.perf_counter()
        watch(total, float(metrics["loss"]))  # type: ignore[index]  # there is at least one step
    finally:
        rows.close()  # type: ignore[attr-defined]
    tokens = max(total - 1, 1) * cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
    return state.model, tokens / (time.perf_counter() - began)


def measure(
    name: str,
    runs: list[RunConfig],
    held_out: RowSource,
    tokenizer: Tokenizer,
    mesh: Mesh,
    align: int,
    progress: _Progress,
) -> Figures:
    """One variant: compiled once, trained and scored for each seed in turn."""
    cfg, total = runs[0], runs[0].train.total_steps
    progress.say(f"{name}: {count_parameters(cfg.model):,} parameters, ffn {cfg.model.ffn}; compiling ...")
    progress.status.update(f"{name}: compiling ...")
    source = open_source(cfg.data, tokenizer, split=cfg.data.split, seed=cfg.train.seed, align=align)
    step_fn = compile_train_step(cfg, mesh, source, warn=progress.say)  # the seed is in the state and the rows, not in the step
    step_fn.compile(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))
    evaluator = Evaluator(cfg, held_out, tokenizer, mesh)
    losses, rates = [], []
    for run in runs:
        where = f"{name}, seed {run.train.seed}"
        watch = lambda step, loss, where=where: progress.now(f"{where}: step {step}/{total}, loss {loss:.4f}")
        model, rate = train(run, step_fn, tokenizer, mesh, align, watch)
        progress.status.update(f"{where}: evaluating ...")
        losses.append(evaluator.evaluate(model)["eval/loss"])
        rates.append(rate)
        del model  # before the next run makes its own
        progress.say(f"{where}: held-out loss {losses[-1]:.4f} after {total} steps, {rate:,.0f} tok/s")
    return {
        "parameters": count_parameters(cfg.model),
        **{key: getattr(cfg.model, key) for key in ("ffn", "scales", "window", "residual")},
        "attention": cfg.train.attention,
        # JSON has no NaN: the loss of a run that diverged is none.
        "held_out": [loss if math.isfinite(loss) else None for loss in losses],
        "tokens_per_s": statistics.median(rates),
        "compile_s": step_fn.seconds,
    }


def compare(variants: dict[str, Figures]) -> None:
    """Adds mean, spread (max - min) and, seed by seed, the difference to dense; None where a run diverged."""
    dense = variants.get("dense", {}).get("held_out")
    for figures in variants.values():
        losses = figures["held_out"]
        whole = None not in losses
        figures["mean"] = statistics.fmean(losses) if whole else None
        figures["spread"] = max(losses) - min(losses) if whole else None
        if dense:
            figures["minus_dense"] = [None if None in pair else pair[0] - pair[1] for pair in zip(losses, dense, strict=True)]


def verdict(variants: dict[str, Figures], floor: float | None) -> tuple[bool | None, str]:
    """(is every seed of nash-mhc below every seed of dense, the sentence that says so with its numbers)."""
    if not {"nash-mhc", "dense"} <= variants.keys():
        return None, "No verdict: it needs both nash-mhc and dense."
    nash, dense = variants["nash-mhc"]["held_out"], variants["dense"]["held_out"]
    if None in nash + dense:
        return None, "No verdict: a run diverged."
    span = lambda losses: f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else f"{losses[0]:.4f}"
    margin, difference = min(dense) - max(nash), statistics.fmean(nash) - statistics.fmean(dense)
    text = (
        f"{'Every' if margin > 0 else 'Not every'} seed of nash-mhc is below every seed of dense: {span(nash)} against "
        f"{span(dense)} nats a token, margin {margin:+.4f} (best of dense - worst of nash-mhc); seed by seed it is below in "
        f"{sum(a < b for a, b in zip(nash, dense, strict=True))} of {len(nash)}, the means differ by {difference:+.4f}"
    )
    if floor is not None:
        means = " and ".join(f"{statistics.fmean(losses) / floor:.3f}x" for losses in (nash, dense))
        text += f"; the floor of the stories is {floor:.4f}, the means are {means} of it"
    return margin > 0, text + ("." if len(nash) > 1 else "; one seed says nothing about the spread.")


def bench_quality(cfg: RunConfig, *, variants: str, seeds: int, eval_rows: int | None = None) -> Figures:
    """Everything is checked before the first step is compiled; one run's state is in memory at a time."""
    names, model, B = chosen(variants), cfg.model, cfg.data.batch_size
    if seeds < 1 or (eval_rows is not None and eval_rows < 1):
        raise ConfigError("--seeds and --eval-rows must be at least 1")
    if model.scales == 1 or model.residual == "plain":
        raise ConfigError("the run's model must be the full one: --model-scales above 1 and --model-residual mhc")
    base, mesh = resolve(cfg)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(f"--tokenizer {cfg.data.tokenizer}: set --model-vocab-size {tokenizer.vocab_size} or more")
    align, numbers = model.coarsest_stride, [cfg.train.seed + i for i in range(seeds)]
    # Four times what a run takes: the figure shall be good to half a percent.
    batches = 4 * cfg.train.eval_batches if eval_rows is None else -(-eval_rows // B)
    if (held_out := open_held_out(cfg.data, tokenizer, align=align)) is None:
        raise ConfigError("nothing is held out to compare the models on; raise --validation-fraction")
    runs: dict[str, list[RunConfig]] = {}
    for name in names:
        run = relative(name, cfg, base, mesh)
        trains = [dataclasses.replace(run.train, seed=seed, eval_batches=batches) for seed in numbers]
        runs[name] = [dataclasses.replace(run, train=train) for train in trains]
    progress = _Progress()
    with progress.status:
        measured = {name: measure(name, runs[name], held_out, tokenizer, mesh, align, progress) for name in names}
    compare(measured)
    floor = floors[0] if (floors := loss_floor(cfg.data, tokenizer)) else None
    below, text = verdict(measured, floor)
    return {
        "devices": describe(mesh), "model_size": cfg.model_size, "dtype": base.train.dtype, "steps": cfg.train.total_steps,
        "batch": f"{cfg.train.grad_accum} x {B} x {cfg.data.seq_len}", "align": align, "seeds": numbers,
        "eval_rows": min(batches * B, len(held_out)), "floor_nats_per_token": floor,
        "variants": measured, "nash_below_dense": below, "verdict": text,
    }  # fmt: skip


def show(figures: Figures) -> None:
    """A column a variant, so that any number of seeds fits a narrow terminal; the verdict below."""
    variants = figures["variants"]
    table = Table("", *variants, title=f"{figures['steps']} steps of {figures['batch']}, {figures['eval_rows']} held-out rows")
    formats = {
        "parameters": ",", "ffn": ",", "held_out": ".4f", "mean": ".4f", "spread": ".4f", "minus_dense": "+.4f",
        "tokens_per_s": ",.0f", "compile_s": ".1f",
    }  # fmt: skip
    for key, form in formats.items():
        columns = [v[key] if isinstance(v[key], list) else [v[key]] for v in variants.values() if key in v]
        for i, values in enumerate(zip(*columns, strict=True)):
            label = f"{key}, seed {figures['seeds'][i]}" if key in ("held_out", "minus_dense") else key
            table.add_row(label, *("diverged" if value is None else format(value, form) for value in values))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{_NOTE}\n{figures['verdict']}", markup=False, soft_wrap=True)
