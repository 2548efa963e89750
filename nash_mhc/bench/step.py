"""`bench step` times the real train step on this machine; `bench compile` compiles it for an absent TPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from nash_mhc.config.schema import ConfigError, DataConfig, MeshConfig, RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.model.architectures import count_parameters, for_platform
from nash_mhc.parallel.mesh import check_fit, describe, make_mesh
from nash_mhc.runtime.hardware import matmul_rate, peak_flops, peak_memory, processors
from nash_mhc.train.device_batches import abstract_batch, to_device
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import create_state, sharded_abstract_state
from nash_mhc.train.step import compile_train_step

DOCUMENTS = 2  # per sequence


def random_rows(data: DataConfig, grad_accum: int, vocab_size: int) -> Rows:
    """Return a batch of random tokens, with two documents per sequence. The content does not affect the speed."""
    shape = (grad_accum, data.batch_size, data.seq_len)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (*shape[:2], shape[2] + 1), np.int32)
    segments = np.broadcast_to(1 + np.arange(shape[2]) * DOCUMENTS // shape[2], shape).astype(np.int32)
    return Rows(tokens[..., :-1], tokens[..., 1:], segments, np.ones(shape, np.float32))


def _peak_memory(compiled: Any, mesh: Mesh) -> int | None:
    """Return the peak bytes of one device, from the allocator or else from the compiler's plan."""
    if (seen := peak_memory(mesh)) is not None:
        return seen
    plan = compiled.memory_analysis()
    return None if plan is None else int(plan.argument_size_in_bytes + plan.temp_size_in_bytes)


def bench_step(cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Return the median step time after the warm-up, and the matmul rate measured in the same run."""
    cfg, mesh = resolve(cfg)
    device = mesh.devices.flat[0]
    state = create_state(cfg, mesh)
    batch = to_device(random_rows(cfg.data, cfg.train.grad_accum, cfg.model.vocab_size), mesh)
    step_fn = compile_train_step(cfg, mesh, most_documents=DOCUMENTS)
    compiled = step_fn.compile(state, batch)
    rate_before = matmul_rate(cfg.train.dtype, device, seconds=1.0)
    # As in training, the host reads the loss of a step while the next one runs. Times are between these reads.
    ends, losses, before = [], [], None
    for _ in range(max(warmup, 1) + steps + 1):
        state, metrics = step_fn(state, batch)
        if before is not None:
            losses.append(float(before["loss"]))
            ends.append(time.perf_counter())
        before = metrics
    jax.block_until_ready(state)
    times = [later - earlier for earlier, later in itertools.pairwise(ends[-steps - 1 :])]
    # The machine's speed may vary; take the better of two measurements.
    rate = max(rate_before, matmul_rate(cfg.train.dtype, device, seconds=1.0))
    seconds = statistics.median(times)
    tokens = cfg.train.grad_accum * cfg.data.batch_size * cfg.data.seq_len
    flops = flops_per_token(cfg) * tokens
    peak_rate = peak_flops(mesh, cfg.train.dtype, rate)
    return {
        "devices": describe(mesh),
        "model_size": cfg.model_size,
        "parameters": count_parameters(cfg.model),
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "dtype": cfg.train.dtype,
        "attention": cfg.train.attention,
        "remat": cfg.train.kept,
        "compile_s": step_fn.seconds,
        "step_ms": seconds * 1e3,
        "step_ms_min": min(times) * 1e3,
        "step_ms_max": max(times) * 1e3,
        "tokens_per_s": tokens / seconds,
        "tflops_per_s": flops / seconds / 1e12,
        "matmul_tflops_per_s": rate * processors(mesh) / 1e12,
        "share_of_matmul": flops / seconds / (rate * processors(mesh)),
        "mfu": None if peak_rate is None else flops / seconds / peak_rate,
        "peak_memory_gib": None if (peak := _peak_memory(compiled, mesh)) is None else peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "finite": bool(np.isfinite(losses).all()),
    }


_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def communicating(text: str) -> str:
    """Return a program's text without collectives over single devices, which only XLA's CPU compiler leaves in."""
    return "\n".join(line for line in text.splitlines() if not re.search(r"replica_groups=\{\{\d+\}", line))


def count_collectives(compiled: Any) -> dict[str, int]:
    """Count the collectives in the program text by kind; one inside a loop counts once."""
    return dict(sorted(Counter(_COLLECTIVE.findall(communicating(compiled.as_text()))).items()))


def _tpu_mesh(cfg: MeshConfig, topology: str) -> Mesh:
    """Return the mesh of an absent TPU."""
    axes, shape = tuple(cfg.axes), tuple(cfg.axes.values())
    try:
        # A host has four chips, except in a topology of one chip.
        single: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if re.fullmatch(r"[^:]+:1(x1)*", topology) else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **single)
    except Exception as error:  # libtpu raises many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--topology {topology} is not available ({reason}); install libtpu and use a name such as v6e:2x4"
        ) from error
    if math.prod(shape) != len(described.devices):
        chips = len(described.devices)
        raise ConfigError(f"--topology {topology} has {chips} chips, the mesh {math.prod(shape)}; set the --mesh flags")
    mesh = topologies.make_mesh(described, shape, axes)
    return type(mesh)(mesh.devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def bench_compile(cfg: RunConfig, topology: str) -> dict[str, Any]:
    """Compile for `topology`, such as v6e:2x4, with libtpu but without a TPU; or for `cpu`, with emulated devices."""
    emulated = dataclasses.replace(cfg.mesh, platform="cpu")
    with contextlib.nullcontext() if topology == "cpu" else hidden("libtpu", "TPU_STDERR_LOG_LEVEL"):
        mesh = make_mesh(emulated) if topology == "cpu" else _tpu_mesh(cfg.mesh, topology)
        check_fit(cfg.data, cfg.model, mesh.shape, resizable=cfg.resizable)
        cfg = for_platform(cfg, "cpu" if topology == "cpu" else "tpu")
        step = compile_train_step(cfg, mesh)
        compiled = step.compile(sharded_abstract_state(cfg, mesh), abstract_batch(cfg.data, cfg.train.grad_accum, mesh))
    memory = compiled.memory_analysis()
    gib = {name: getattr(memory, f"{name}_size_in_bytes") / 2**30 for name in ("argument", "output", "alias", "temp")}
    return {
        "topology": f"{topology}, mesh {cfg.mesh}",
        "model_size": cfg.model_size,
        "parameters": count_parameters(cfg.model),
        "batch": f"{cfg.train.grad_accum} x {cfg.data.batch_size} x {cfg.data.seq_len}",
        "remat": cfg.train.kept,
        "compile_s": step.seconds,
        "state_and_batch_gib": gib["argument"],
        "temporaries_gib": gib["temp"],
        "peak_gib_per_chip": gib["argument"] + gib["output"] - gib["alias"] + gib["temp"],
        # Live bytes, without the fragmentation in the figure above. The TPU compiler rejects a program if they exceed
        # the chip's memory.
        "live_gib_per_chip": memory.peak_memory_in_bytes / 2**30,
        "collectives": ", ".join(f"{kind} {count}" for kind, count in count_collectives(compiled).items()),
    }


@contextlib.contextmanager
def hidden(library: str, unless: str) -> Iterator[None]:
    """Hide what a C++ library writes to stderr and print the number of lines, unless an environment variable is set.

    This redirects the file descriptor, so Python's messages are hidden, too.
    """
    if unless in os.environ:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            if lines := sum(1 for _ in file):
                print(f"hid {lines} lines of {library}; {unless}=0 shows them", file=sys.stderr)
