"""`bench step`: the real train step, timed on the devices at hand."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nash_mhc.config.schema import RunConfig
from nash_mhc.data.pack import Rows
from nash_mhc.estimate.roofline import flops_per_token
from nash_mhc.model.architectures import count_parameters
from nash_mhc.parallel.mesh import describe
from nash_mhc.runtime.hardware import matmul_rate, peak_flops, peak_memory, processors
from nash_mhc.train.device_batches import to_device
from nash_mhc.train.devices import resolve
from nash_mhc.train.state import create_state
from nash_mhc.train.step import compile_train_step

DOCUMENTS = 2  # in a row


def random_rows(cfg: RunConfig, seed: int) -> Rows:
    """Random tokens in rows of two documents each: what a step costs does not depend on what it reads."""
    shape = (cfg.train.grad_accum, cfg.data.batch_size, cfg.data.seq_len)
    tokens = np.random.default_rng(seed).integers(0, cfg.model.vocab_size, (*shape[:2], shape[2] + 1), np.int32)
    segments = np.broadcast_to(1 + np.arange(shape[2]) * DOCUMENTS // shape[2], shape).astype(np.int32)
    return Rows(tokens[..., :-1], tokens[..., 1:], segments, np.ones(shape, np.float32))


def _peak_memory(compiled: Any, mesh: Mesh) -> int | None:
    """Bytes on one device at the worst moment: as the allocator saw it, or as the compiler planned it."""
    if (seen := peak_memory(mesh)) is not None:
        return seen
    plan = compiled.memory_analysis()
    return None if plan is None else int(plan.argument_size_in_bytes + plan.temp_size_in_bytes)


def bench_step(cfg: RunConfig, *, steps: int, warmup: int) -> dict[str, Any]:
    """Median step time after the warm-up, beside the matmul rate measured in the same run."""
    cfg, mesh = resolve(cfg)
    device = mesh.devices.flat[0]
    state = create_state(cfg, mesh)
    batch = to_device(random_rows(cfg, 0), mesh)
    step_fn = compile_train_step(cfg, mesh, most_documents=DOCUMENTS)
    compiled = step_fn.compile(state, batch)
    rate_before = matmul_rate(cfg.train.dtype, device, seconds=1.0)
    # As in training: the host reads a step's loss while the next one runs, and times are between such ends.
    ends, losses, before = [], [], None
    for _ in range(max(warmup, 1) + steps + 1):
        state, metrics = step_fn(state, batch)
        if before is not None:
            losses.append(float(before["loss"]))
            ends.append(time.perf_counter())
        before = metrics
    jax.block_until_ready(state)
    times = [later - earlier for earlier, later in itertools.pairwise(ends[-steps - 1 :])]
    # The machine may be slower or faster at either end; the better of the two is what it can do.
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
