"""`bench parts`: every part of the step by itself, against the least that it could take, so that it is known what to
improve next.

A part runs at the run's own shapes, dtype, kernels and remat, with the weights of one layer. Its floor is the longer of
two times: its matrix work at the rate of a large matrix product, and its bytes at the rate of a long pass over memory,
both measured in the same minutes. The least bytes: on the way there all that goes in is read once and all that comes
out is written once; on the way back the gradients of what came out are read, what went in is read again where they
depend on it, and the gradients of what went in are written. Weights count as they are kept. Whatever a part writes down
for itself in between, computes again or converts is over the floor. FLOPs are those of matrix products: 2 for each
number of a weight and token, as many for each gradient; in attention 4 for each channel of a query and a key that it
sees, twice that on the way back.

What remat computes again in a part counts to the part. What is in no part (entering and leaving the streams, reports,
norms of all gradients, what remat computes again between parts, what the compiler copies between them) is the rest: the
step's time without all parts. It is below zero where the compiler makes one pass of two parts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from nash_mhc.bench.model_parts import Given, Part, Walk, check, chosen, module_of
from nash_mhc.bench.step import DOCUMENTS, bench_step, random_rows
from nash_mhc.config.schema import ModelConfig, RunConfig
from nash_mhc.model.remat import remat_policy
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.mesh import describe
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.hardware import cores, matmul_rate, memory_rate
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.devices import resolve
from nash_mhc.train.state import abstract_state, create_state

_ROUNDS = 5  # of many calls, of which the median counts
_AHEAD = 8  # calls that wait for their turn on an accelerator; on a CPU they might run beside each other
_CALL_S, _MOST_COPIES = 4e-4, 4  # what a call is to take at least, that starting it does not count: else it has several copies
_COMPILERS = 8  # threads
_WIDTH = 110  # columns that the table needs


class Rates(NamedTuple):
    flops: float  # a second
    bytes: float

    def floor(self, flops: float, moved: float) -> float:
        """Seconds."""
        return max(flops / self.flops, moved / self.bytes)


class Least(NamedTuple):
    """What a part needs at least, there and back."""

    flops: float
    bytes: float


def one_group(cfg: RunConfig, groups: int = 1) -> RunConfig:
    """The same run with so few layers."""
    assert isinstance(cfg.model, ModelConfig)
    layers = groups * len(cfg.model.windows)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, layers=layers))


def parts_and_arrays(cfg: RunConfig, walked: Callable[[Callable[..., Any]], Any]) -> tuple[dict[str, Part], dict[str, Given]]:
    """`walked` runs the walk over a state and a batch, or only asks for its shapes."""
    seen: dict[str, Part] = {}

    def walk(model: Any, batch: Any) -> dict[str, Given]:
        trained, frozen = Training.of(cfg).split(model)
        one = Walk(cfg, DOCUMENTS, trained, frozen, jax.tree.map(lambda a: a[0], batch))
        seen.update(one.parts)
        return one.given

    return seen, walked(walk)


def least(part: Part, given: Given, *, back: bool) -> Least:
    size = lambda *trees: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees))
    went_in = size(given.weights, given.frozen, given.arrays, given.aside) - part.unread
    moved = went_in + size(part.returned(given.out))
    if not back:
        return Least(part.flops, moved)
    moved += went_in * part.reads_again + size(given.out) + size(given.weights, given.arrays)
    return Least(part.flops + part.flops_back, moved)


def _program(part: Part, cfg: RunConfig, *, back: bool) -> Callable[[list[Given], Any], Any]:
    """Of any number of copies of what the part works on: none of them is the same array as another, so that no result
    can stand for two, and all come in from outside, so that nothing is known of them."""
    dtype, policy = jnp.dtype(cfg.train.dtype), remat_policy(cfg.train.kept)

    def once(given: Given) -> Any:
        def run(weights: Any, arrays: Any) -> Any:
            return part.run(module_of(part, given._replace(weights=weights), dtype), arrays, given.aside)

        if not back:
            return part.returned(run(given.weights, given.arrays))
        out, pull = jax.vjp(jax.checkpoint(run, policy=policy) if part.in_layer else run, given.weights, given.arrays)
        return part.returned(out), pull(given.out)

    return lambda copies, _: [once(given) for given in copies]


class Timed(NamedTuple):
    """A program that is compiled, and how to time it."""

    run: Callable[[list[Given], Any], Any]
    copies: int

    def seconds(self, given: Given, at_least: float, ahead: int) -> float:
        """Of one copy, while so many calls are queued ahead of the one that is waited for."""
        copy = jax.jit(lambda given: jax.tree.map(jnp.copy, given))
        arrays = [copy(given) for _ in range(self.copies)]

        def calls(count: int) -> float:
            queued: collections.deque[Any] = collections.deque()
            began = time.perf_counter()
            for _ in range(count):
                queued.append(self.run(arrays, ()))
                if len(queued) > ahead:  # what all of them have made at once would not fit the memory
                    jax.block_until_ready(queued.popleft())
            jax.block_until_ready(list(queued))
            return (time.perf_counter() - began) / count

        calls(1)
        count = max(1, math.ceil(at_least / _ROUNDS / calls(1)))
        return statistics.median(calls(count) for _ in range(_ROUNDS)) / self.copies


def _compiled(cfg: RunConfig, mesh: Mesh, rates: Rates, parts: dict[str, Part], given: dict[str, Given]) -> dict[Any, Timed]:
    """(name, there and back?) -> program; several at once, for most of the time of each is one thread's."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)

    def compile_one(name: str, back: bool) -> Timed:
        part, abstract = parts[name], jax.tree.map(shape, given[name])
        floor = rates.floor(*least(part, abstract, back=back))
        copies = 1 if on_cpu else min(_MOST_COPIES, math.ceil(_CALL_S / floor))
        step = CompiledStep(_program(part, cfg, back=back), mesh, deterministic=cfg.train.deterministic)
        return Timed(step.compile([abstract] * copies, ()), copies)

    wanted = [(name, back) for name in given for back in ([False, True] if parts[name].has_gradient else [False])]
    with concurrent.futures.ThreadPoolExecutor(max(1, min(_COMPILERS, int(cores())))) as pool:
        return dict(zip(wanted, pool.map(lambda each: compile_one(*each), wanted), strict=True))


def _row(part: Part, given: Given, rates: Rates, forward: float, whole: float) -> dict[str, Any]:
    needed = least(part, given, back=part.has_gradient)
    floor = rates.floor(*needed)
    return {
        "part": part.name,
        "times": part.times,
        "forward_ms": forward * 1e3,
        "ms": whole * 1e3,
        "ms_a_step": whole * part.times * 1e3,
        "gb": needed.bytes / 1e9,
        "gflop": needed.flops / 1e9,
        "forward_floor_ms": rates.floor(*least(part, given, back=False)) * 1e3,
        "floor_ms": floor * 1e3,
        "bound_by": "matmul" if needed.flops / rates.flops > needed.bytes / rates.bytes else "memory",
        "share_of_floor": floor / whole,
        "lost_ms_a_step": (whole - floor) * part.times * 1e3,
    }


def step_ms(cfg: RunConfig, steps: int) -> tuple[float, str]:
    """(time of the whole step, how it is known): of a deep model from two shallow ones, whose state is small."""
    assert isinstance(cfg.model, ModelConfig)
    groups = cfg.model.layers // len(cfg.model.windows)
    few = (1, 2) if cfg.train.unroll == "yes" else (2, 4)  # a loop of one is none
    timed = lambda groups: bench_step(one_group(cfg, groups), steps=steps, warmup=2)["step_ms"]
    if groups <= few[1]:
        return timed(groups), "measured"
    first, second = (timed(count) for count in few)
    layers = [count * len(cfg.model.windows) for count in few]
    return first + (second - first) * (groups - few[0]) / (few[1] - few[0]), f"from {layers[0]} and {layers[1]} layers"


def bench_parts(
    cfg: RunConfig, *, only: str | None = None, whole_step_ms: float | None = None, seconds: float = 0.2
) -> dict[str, Any]:
    """Figures of each part, those first that lose most. `seconds`: how long each program is timed for."""
    cfg, mesh = resolve(cfg)
    check(cfg, mesh.size)
    device, began = mesh.devices.flat[0], time.perf_counter()
    rates = lambda: Rates(matmul_rate(cfg.train.dtype, device, seconds), memory_rate(device, seconds))
    with jax.set_mesh(mesh):  # a mistake is told at once, before anything is measured or made
        like = abstract_state(one_group(cfg)).model, abstract_batch(cfg.data, cfg.train.grad_accum, mesh)
        names = chosen(list(parts_and_arrays(cfg, lambda walk: jax.eval_shape(walk, *like))[0]), only)
    before = rates()
    state, batch = create_state(one_group(cfg), mesh), to_device(random_rows(cfg, 0), mesh)
    wanted = lambda walk: lambda model, batch: {name: g for name, g in walk(model, batch).items() if name in names}
    made = lambda walk: CompiledStep(wanted(walk), mesh, deterministic=cfg.train.deterministic)(state.model, batch)
    parts, given = parts_and_arrays(cfg, made)
    del state
    print(f"compiling {sum(1 + parts[name].has_gradient for name in names)} programs ...", file=sys.stderr, flush=True)
    programs = _compiled(cfg, mesh, before, parts, given)
    compiled_s = time.perf_counter() - began
    times = {}
    for name in names:
        each = [programs[name, back] for back in (False, True) if (name, back) in programs]
        times[name] = [timed.seconds(given[name], seconds, 0 if device.platform == "cpu" else _AHEAD) for timed in each]
    # The machine may be slower or faster at either end; the better of the two is what it can do.
    best = Rates(*map(max, before, rates()))
    rows = [_row(parts[name], given[name], best, times[name][0], times[name][-1]) for name in names]
    del given, programs
    figures = {
        "devices": describe(mesh),
        "model_size": cfg.model_size,
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "dtype": cfg.train.dtype,
        "attention": cfg.train.attention,
        "remat": cfg.train.kept,
        "matmul_tflops_per_s": best.flops / 1e12,
        "memory_gb_per_s": best.bytes / 1e9,
        "parts": sorted(rows, key=lambda row: -row["lost_ms_a_step"]),
        "parts_ms": sum(row["ms_a_step"] for row in rows),
        "floor_ms": sum(row["floor_ms"] * row["times"] for row in rows),
        "prepared_s": compiled_s,
    }
    if only is None:
        whole, source = (whole_step_ms, "given") if whole_step_ms is not None else step_ms(cfg, steps=5)
        figures |= {"step_ms": whole, "step_ms_is": source, "rest_ms": whole - figures["parts_ms"]}
    return figures


def show(figures: dict[str, Any]) -> None:
    """What loses most comes first; the rest of the step stands among the parts, with no floor."""
    title = f"{figures['model_size']}, {figures['batch']}, {figures['dtype']}, remat {figures['remat']}, {figures['devices']}"
    caption = "milliseconds; lost: over the floor, a step"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for name in ("times", "forward", "and back", "floor", "share", "bound by", "GB", "GFLOP", "a step", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        (r["lost_ms_a_step"], [
            r["part"], str(r["times"]), f"{r['forward_ms']:.3f}", f"{r['ms']:.3f}", f"{r['floor_ms']:.3f}",
            f"{r['share_of_floor']:.0%}", r["bound_by"], f"{r['gb']:.3g}", f"{r['gflop']:.4g}", f"{r['ms_a_step']:.2f}",
            f"{r['lost_ms_a_step']:.2f}",
        ])
        for r in figures["parts"]
    ]  # fmt: skip
    if "rest_ms" in figures:
        rest = f"{figures['rest_ms']:.2f}"
        rows.append((figures["rest_ms"], ["the rest", *[""] * 8, rest, rest]))
    rows.sort(key=lambda row: -row[0])
    for _, cells in rows:
        table.add_row(*cells)
    console = Console(highlight=False, width=max(Console().width, _WIDTH))
    console.print(table)
    rates = f"{figures['matmul_tflops_per_s']:,.4g} TFLOP/s of matrix products and {figures['memory_gb_per_s']:,.4g} GB/s"
    sums = f"All parts take {figures['parts_ms']:,.4g} ms a step; their floors, {figures['floor_ms']:,.4g}."
    if "step_ms" in figures:
        sums += f" The step takes {figures['step_ms']:,.4g} ({figures['step_ms_is']})."
    lost, (name, *_) = rows[0]
    console.print(f"Floors are those of {rates}, measured here. {sums}", markup=False, soft_wrap=True)
    console.print(f"Most is lost in {name}: {lost:,.3g} ms a step.", markup=False, soft_wrap=True)
