"""`bench parts`: time every part of the step separately and compare it with a lower bound, to see what to improve next.

The parts are the model's own classes, called in isolation at the run's shapes, dtype, kernels and remat, with the
weights of one layer. The floor of a part is the longer of two times: its matrix work at the measured matmul rate, and
its bytes at the measured memory bandwidth. The least bytes are: inputs read once and outputs written once; backward,
gradients of the outputs read, inputs read again if needed, and gradients of the inputs written. Weights count in the
dtype in which they are stored. Temporaries, recomputation and conversions are above the floor.

Recomputation inside a part counts to the part. The rest of the step (entering and leaving the streams, reports,
gradient norms, recomputation and copies between parts) is its time minus all parts. It is negative where XLA fuses two
parts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from nash_mhc.bench.step import bench_step, random_rows, settings_of
from nash_mhc.bench.step_parts import Arrays, Part, check, lower_bound, module_of, one_group, parts_and_arrays, select_parts
from nash_mhc.config.schema import ArchitectureConfig, ConfigError, ModelConfig, RunConfig, TrainConfig
from nash_mhc.model.remat import remat_policy
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.runtime.hardware import cores, matmul_rate, memory_rate
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import abstract_state, create_state

log = logging.getLogger(__name__)
_ROUNDS = 5  # timed rounds of many calls; the median counts
_QUEUED = 8  # calls queued on an accelerator; on a CPU they might run in parallel
_CALL_S, _MOST_COPIES = 4e-4, 4  # a program has several copies of a part until a call takes this long
_COMPILERS = 8  # threads
_TABLE_WIDTH = 110


class Rates(NamedTuple):
    flops: float  # per second
    bytes: float

    def floor(self, flops: float, moved: float) -> float:
        """Return the least seconds."""
        return max(flops / self.flops, moved / self.bytes)


def _program(part: Part, train: TrainConfig, *, backward: bool) -> Callable[[list[Arrays], Any], Any]:
    """Return a program that runs the part on several copies of its arrays.

    All copies are separate arguments: XLA can neither merge two results nor fold constants.
    """
    dtype, policy = jnp.dtype(train.dtype), remat_policy(train.kept)

    def once(arrays: Arrays) -> Any:
        def run(weights: Any, inputs: Any) -> Any:
            return part.run(module_of(part, arrays._replace(weights=weights), dtype), inputs, arrays.constants)

        if not backward:
            return part.written(run(arrays.weights, arrays.inputs))
        checkpointed = jax.checkpoint(run, policy=policy) if part.in_layer else run
        out, vjp = jax.vjp(checkpointed, arrays.weights, arrays.inputs)
        return part.written(out), vjp(arrays.out)

    return lambda copies, _: [once(arrays) for arrays in copies]


class _Program(NamedTuple):
    """A compiled program."""

    run: Callable[[list[Arrays], Any], Any]
    copies: int

    def seconds(self, arrays: Arrays, at_least: float, queued: int) -> float:
        """Return the median run time per copy of the arrays, in seconds.

        Measured over `at_least` seconds, with `queued` calls in flight.
        """
        copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
        copies = [copy(arrays) for _ in range(self.copies)]

        def per_call(count: int) -> float:
            pending: collections.deque[Any] = collections.deque()
            start = time.perf_counter()
            for _ in range(count):
                pending.append(self.run(copies, ()))
                if len(pending) > queued:  # the results of all calls at once would not fit into memory
                    jax.block_until_ready(pending.popleft())
            jax.block_until_ready(list(pending))
            return (time.perf_counter() - start) / count

        per_call(1)
        count = max(1, math.ceil(at_least / _ROUNDS / per_call(1)))
        return statistics.median(per_call(count) for _ in range(_ROUNDS)) / self.copies


def _compiled(
    train: TrainConfig, mesh: Mesh, rates: Rates, parts: dict[str, Part], arrays: dict[str, Arrays]
) -> dict[tuple[str, bool], _Program]:
    """Return the programs by (name of the part, whether with the backward pass), compiled in parallel."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)

    def compile_one(name: str, backward: bool) -> _Program:
        part, abstract = parts[name], jax.tree.map(shape, arrays[name])
        floor = rates.floor(*lower_bound(part, abstract, backward=backward))
        copies = 1 if on_cpu else min(_MOST_COPIES, math.ceil(_CALL_S / floor))
        step = CompiledStep(_program(part, train, backward=backward), mesh, deterministic=train.deterministic)
        return _Program(step.compile([abstract] * copies, ()), copies)

    wanted = [(name, backward) for name in arrays for backward in ([False, True] if parts[name].has_gradient else [False])]
    with concurrent.futures.ThreadPoolExecutor(max(1, min(_COMPILERS, int(cores())))) as pool:
        return dict(zip(wanted, pool.map(lambda args: compile_one(*args), wanted), strict=True))


def _figures(part: Part, arrays: Arrays, rates: Rates, forward: float, whole: float) -> dict[str, Any]:
    needed = lower_bound(part, arrays, backward=part.has_gradient)
    floor = rates.floor(*needed)
    return {
        "part": part.name,
        "times": part.times,
        "forward_ms": forward * 1e3,
        "ms": whole * 1e3,
        "ms_per_step": whole * part.times * 1e3,
        "gb": needed.bytes / 1e9,
        "gflop": needed.flops / 1e9,
        "forward_floor_ms": rates.floor(*lower_bound(part, arrays, backward=False)) * 1e3,
        "floor_ms": floor * 1e3,
        "bound_by": "matmul" if needed.flops / rates.flops > needed.bytes / rates.bytes else "memory",
        "share_of_floor": floor / whole,
        "lost_ms_per_step": (whole - floor) * part.times * 1e3,
    }


def step_ms(model: ArchitectureConfig, unroll: str, measure: Callable[[ModelConfig], float]) -> tuple[float, str]:
    """Return (time of the whole step, its source). A deep model is extrapolated from two shallow ones.

    `measure` returns the ms/step of a model.
    """
    assert isinstance(model, ModelConfig)
    groups = model.layers // len(model.windows)
    few = (1, 2) if unroll == "yes" else (2, 4)  # XLA removes a loop of one iteration
    if groups <= few[1]:
        return measure(model), "measured"
    first, second = (measure(one_group(model, count)) for count in few)
    layers = [count * len(model.windows) for count in few]
    return first + (second - first) * (groups - few[0]) / (few[1] - few[0]), f"from {layers[0]} and {layers[1]} layers"


def bench_parts(
    cfg: RunConfig, *, only: str | None = None, whole_step_ms: float | None = None, seconds: float = 0.2
) -> dict[str, Any]:
    """Return the figures of each part, the largest loss first. Each program is timed for `seconds`."""
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g} must be above 0")
    cfg, mesh = resolve(cfg)
    check(cfg.model, cfg.objective.name, mesh.size)
    device, start = mesh.devices.flat[0], time.perf_counter()
    of_one_group = dataclasses.replace(cfg, model=one_group(cfg.model))
    rates = lambda: Rates(matmul_rate(cfg.train.dtype, device, seconds), memory_rate(device, seconds))
    with jax.set_mesh(mesh):  # check the names before anything is measured
        shapes = abstract_state(of_one_group).model, abstract_batch(cfg.data, cfg.train.grad_accum, mesh)
        names = select_parts(list(parts_and_arrays(cfg, lambda walk: jax.eval_shape(walk, *shapes))[0]), only)
    before = rates()
    state, batch = (
        create_state(of_one_group, mesh),
        to_device(random_rows(cfg.data, cfg.train.grad_accum, cfg.model.vocab_size), mesh),
    )
    wanted = lambda walk: lambda model, batch: {name: a for name, a in walk(model, batch).items() if name in names}
    run = lambda walk: CompiledStep(wanted(walk), mesh, deterministic=cfg.train.deterministic)(state.model, batch)
    parts, arrays = parts_and_arrays(cfg, run)
    del state
    log.info(f"compiling {sum(1 + parts[name].has_gradient for name in names)} programs ...")
    programs = _compiled(cfg.train, mesh, before, parts, arrays)
    prepared_s = time.perf_counter() - start
    queued = 0 if device.platform == "cpu" else _QUEUED
    times = {
        name: [
            programs[name, backward].seconds(arrays[name], seconds, queued)
            for backward in (False, True) if (name, backward) in programs
        ]
        for name in names
    }  # fmt: skip
    best = Rates(*map(max, before, rates()))  # the machine's speed may vary
    rows = [_figures(parts[name], arrays[name], best, times[name][0], times[name][-1]) for name in names]
    del arrays, programs
    figures = settings_of(cfg, mesh) | {
        "matmul_tflops_per_s": best.flops / 1e12,
        "memory_gb_per_s": best.bytes / 1e9,
        "parts": sorted(rows, key=lambda row: -row["lost_ms_per_step"]),
        "parts_ms": sum(row["ms_per_step"] for row in rows),
        "floor_ms": sum(row["floor_ms"] * row["times"] for row in rows),
        "prepared_s": prepared_s,
    }
    if only is None:
        measure = lambda model: bench_step(dataclasses.replace(cfg, model=model), steps=5, warmup=2)["step_ms"]
        whole, source = whole_step_ms, "given"
        if whole is None:
            whole, source = step_ms(cfg.model, cfg.train.unroll, measure)
        figures |= {"step_ms": whole, "step_ms_is": source, "rest_ms": whole - figures["parts_ms"]}
    return figures


# Column of the table, figure, format.
_COLUMNS = (
    ("part", "part", "s"), ("times", "times", "d"), ("forward", "forward_ms", ".3f"), ("and back", "ms", ".3f"),
    ("floor", "floor_ms", ".3f"), ("share", "share_of_floor", ".0%"), ("bound by", "bound_by", "s"), ("GB", "gb", ".3g"),
    ("GFLOP", "gflop", ".4g"), ("per step", "ms_per_step", ".2f"), ("lost", "lost_ms_per_step", ".2f"),
)  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    """Print the parts, the largest loss first, with the rest of the step among them."""
    title = f"{figures['model_size']}, {figures['batch']}, {figures['dtype']}, remat {figures['remat']}, {figures['devices']}"
    caption = "ms; lost: ms/step above the floor"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name, *_ in _COLUMNS:
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    rows = list(figures["parts"])
    if "rest_ms" in figures:
        rows.append({"part": "the rest", "ms_per_step": figures["rest_ms"], "lost_ms_per_step": figures["rest_ms"]})
    rows.sort(key=lambda row: -row["lost_ms_per_step"])
    for row in rows:
        table.add_row(*(format(row[key], form) if key in row else "" for _, key, form in _COLUMNS))
    console = Console(highlight=False, width=max(Console().width, _TABLE_WIDTH))
    console.print(table)
    rates = f"{figures['matmul_tflops_per_s']:,.4g} TFLOP/s of matmuls and {figures['memory_gb_per_s']:,.4g} GB/s"
    sums = f"All parts take {figures['parts_ms']:,.4g} ms/step, their floors {figures['floor_ms']:,.4g}."
    if "step_ms" in figures:
        sums += f" The step takes {figures['step_ms']:,.4g} ms ({figures['step_ms_is']})."
    console.print(f"Floors assume {rates}, measured here. {sums}", markup=False, soft_wrap=True)
    largest = f"Largest loss: {rows[0]['part']}, {rows[0]['lost_ms_per_step']:,.3g} ms/step."
    console.print(largest, markup=False, soft_wrap=True)
