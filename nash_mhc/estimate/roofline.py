"""Estimate the time of a step from matrix work, memory traffic and network traffic, by the chip's data sheet.

A roofline with three roofs. Matrix products, other passes over memory, and the exchanges of tp (which every layer waits
for) take turns. The collectives of fsdp and data overlap with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from nash_mhc.config.schema import ArchitectureConfig, RunConfig, TrainConfig
from nash_mhc.estimate.memory import Memory, WeightsKey, abstract_weights, compute_itemsize
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution
from nash_mhc.model.remat import kept_names
from nash_mhc.objectives.registry import feed_of
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import ADAPTER, GATE, HEAD, MATRIX, TABLE, Role, map_declared
from nash_mhc.parallel.sharding import GATHERED, RULES
from nash_mhc.runtime.chips import Machine

# Shares of the data sheet that our programs reach, from `bench` on an H200 (docs/performance.md: 1b and small, dense
# and Nash-MHC). Other chips are assumed to reach the same; docs/planning.md compares with measurements.
MATMUL, BANDWIDTH, LINKS = 0.68, 0.5, 0.7
ERROR = 0.25  # largest relative difference between estimated and measured times
_LOGIT_BYTES = 18  # traffic per logit: float32 written and read twice, gradients written and read twice
_LOOP_COPIES = 2  # of activations saved by a loop over layers: into its stack, and out of it (docs/experiments.md)
_WEIGHT_PASSES = 3  # over a device's weights per microbatch: forward, recomputed forward, backward
_TP_EXCHANGES = 10  # of activations per layer: two gathers and two scatters forward, four backward, two gathers again


class Times(NamedTuple):
    """Seconds per step."""

    compute: float
    memory: float
    exchange: float  # of tp
    gather: float  # of fsdp and data; hidden while it is shorter than the rest

    @property
    def step(self) -> float:
        return max(self.compute + self.memory + self.exchange, self.gather)

    @property
    def bound_by(self) -> str:
        """Return what takes most of the time, by the name of its column in `plan`."""
        if self.gather >= self.compute + self.memory + self.exchange:
            return "net"
        return max(("compute", self.compute), ("memory", self.memory), ("tp", self.exchange), key=lambda x: x[1])[0]


@dataclass(frozen=True)
class Speed:
    times: Times
    tokens_per_s: float
    mfu: float

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_per_s / 3600


def flops_per_token(cfg: RunConfig) -> float:
    """Return the useful matrix work per token: the model's own, without gradients of frozen weights, with adapters.

    An embedding table counts only as output projection, without padding; lookups cost nothing.
    """
    trained, frozen = Training.of(cfg).split(abstract_weights(WeightsKey.of(cfg)).model)

    def arrays(part: Any, *roles: Role) -> list[Any]:
        chosen = lambda declared, array: array if declared.is_matrix and declared.role in roles else None
        return jax.tree.leaves(map_declared(part, chosen))

    unneeded = sum(array.size for array in arrays(frozen, MATRIX, GATE))
    if (tables := arrays(frozen, TABLE, HEAD)) and not arrays(trained, TABLE, HEAD):
        unneeded += max(cfg.model.vocab_size * table.size // table.shape[0] for table in tables)
    added = sum(array.size for array in arrays(trained, ADAPTER))
    return architecture_of(cfg.model).flops_per_token(cfg.model, cfg.data.seq_len) - 2.0 * unneeded + 6.0 * added


def recomputed(model: ArchitectureConfig, seq_len: int, train: TrainConfig) -> float:
    """Return the work that remat adds, as a share of the useful matrix work: a third if it recomputes all layers.

    `dots` recomputes only the first two feed-forward products and attention. Of --remat-keep, only `ffn-up` counts.
    """
    useful = architecture_of(model).flops_per_token(model, seq_len)
    if train.kept == "none":
        return 0.0
    sizes = {length.axis: length.size for length in model.divisible_sizes()}
    output = 6.0 * model.vocab_size * sizes.get("embed", 0)
    saves_ffn = "ffn-up" in kept_names(train.kept)
    first = 4.0 * sizes.get("embed", 0) * sizes.get("ffn", 0) * model.depth
    if train.remat == "full":
        return ((useful - output) / 3 - (first if saves_ffn else 0)) / useful
    return 0.0 if saves_ffn else min(first / useful, 1 / 3)


def _network_bytes(weights: float, gradients: float, mesh: Mapping[str, int], accum: int, slices: int) -> tuple[float, float]:
    """Return the bytes that a device sends per step for fsdp and data: over its links, and between slices.

    `weights` and `gradients` are the bytes of its shares of them, weights in the compute dtype.
    """
    fsdp, data = mesh[GATHERED], mesh["data"]
    links = 3 * accum * weights * (fsdp - 1)  # gathered forward and backward, gradients scattered
    within = data // slices
    links += accum * 2 * gradients * (within - 1) / max(within, 1)
    return links, 2 * gradients * (slices - 1) / slices


def speed(cfg: RunConfig, mesh: Mapping[str, int], machine: Machine, memory: Memory) -> Speed:
    """Estimate the speed of a configuration with resolved dtype and kernel."""
    chip, accum, itemsize = machine.chip, cfg.train.grad_accum, compute_itemsize(cfg.train.dtype)
    tokens = accum * cfg.data.batch_size * cfg.data.seq_len
    tp = math.prod(mesh[a] for a in RULES["time_split"])
    sequences = cfg.data.batch_size // math.prod(mesh[a] for a in RULES["batch"])
    own_tokens = accum * sequences * cfg.data.seq_len
    useful = flops_per_token(cfg) * tokens / machine.chips
    frozen = feed_of(cfg.objective.name).models(cfg)  # a forward pass: a third of a training step
    reading = sum(architecture_of(m).flops_per_token(m, cfg.data.seq_len) / 3 for m in frozen) * tokens / machine.chips
    activations = architecture_of(cfg.model).activations
    assert activations is not None  # `estimate`, which made `memory`, has checked it
    execution = Execution(cfg.train.dtype, cfg.train.kept, cfg.train.attention)
    moved = accum * activations(cfg.model, execution, sequences, cfg.data.seq_len, tp).moved
    # The update reads and writes the state, and reads gradients, which have the dtype of the weights.
    moved += 2 * (memory.parameters + memory.optimizer) + memory.parameters
    moved += _LOGIT_BYTES * own_tokens * cfg.model.padded_vocab / tp
    if chip.platform == "gpu" and cfg.train.unroll == "no":
        moved += _LOOP_COPIES * accum * (memory.streams + memory.activations)
    width = next(length.size for length in cfg.model.divisible_sizes() if length.axis == "embed")
    weights = memory.parameters * itemsize / (2 if cfg.precision.weights_dtype == "bfloat16" else 4)
    moved += accum * _WEIGHT_PASSES * weights * mesh[GATHERED]
    exchanged = _TP_EXCHANGES * cfg.model.depth * own_tokens * width * itemsize * (tp - 1) / tp
    links, network = _network_bytes(weights, memory.gradients, mesh, accum, machine.slices)
    over_network = network / ((chip.network_gbps or math.inf) * 1e9)
    work = useful * (1 + recomputed(cfg.model, cfg.data.seq_len, cfg.train)) + reading
    times = Times(
        compute=work / (chip.tflops * 1e12 * MATMUL),
        memory=moved / (chip.memory_gbps * 1e9 * BANDWIDTH),
        exchange=exchanged / (chip.links_gbps * 1e9 * LINKS),
        gather=links / (chip.links_gbps * 1e9 * LINKS) + over_network / LINKS,
    )
    return Speed(times, tokens / times.step, useful / times.step / (chip.tflops * 1e12))
