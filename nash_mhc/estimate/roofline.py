"""How long a step takes at best, and as these programs run: matrix work, memory and network, by the chip's data sheet.

A roofline with three roofs. Matrix products, and passes over memory outside of them, take turns; so do the exchanges of
tp, which every layer waits for. What fsdp gathers and what is summed over all groups goes on beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from nash_mhc.config.schema import RunConfig
from nash_mhc.estimate.memory import Memory, abstract_weights
from nash_mhc.estimate.teachers import reading_flops
from nash_mhc.model.architectures import architecture_of
from nash_mhc.model.protocol import Execution
from nash_mhc.model.remat import kept_names
from nash_mhc.optim.trainable import Training
from nash_mhc.parallel.params import ADAPTER, GATE, MATRIX, TABLE, Role, map_declared
from nash_mhc.parallel.sharding import GATHERED, RULES
from nash_mhc.runtime.chips import Machine

# Shares of the data sheet that our programs attain, from `bench` on an H200 (docs/performance.md: 1b and small, dense
# and Nash-MHC). Other chips are taken to be as good; docs/planning.md has how far each measured figure is from this.
MATMUL, BANDWIDTH, LINKS = 0.68, 0.5, 0.7
ERROR = 0.25  # of a time, either way: what the measured figures differ by at most
# Bytes that move for each of a token's logits: float32 written and read twice, their gradients written and read twice.
_LOGIT_BYTES = 18
_LOOP_COPIES = 2  # of what is kept for the backward pass: into the loop's stack, and out of it (docs/experiments.md)
_WEIGHT_PASSES = 3  # over a device's weights, for each part of a batch: forwards, forwards again, backwards
_TP_EXCHANGES = 10  # of whole rows, a layer: two gathers and two scatters forwards, as many backwards, two gathers again


class Times(NamedTuple):
    """Seconds of a step."""

    compute: float
    memory: float
    exchange: float  # of tp
    gather: float  # of fsdp and data: hidden, as long as it is the shorter

    @property
    def step(self) -> float:
        return max(self.compute + self.memory + self.exchange, self.gather)

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        if self.gather >= self.compute + self.memory + self.exchange:
            return "network"
        return max(("compute", self.compute), ("memory", self.memory), ("exchange", self.exchange), key=lambda x: x[1])[0]


@dataclass(frozen=True)
class Speed:
    times: Times
    tokens_a_second: float
    mfu: float

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_a_second / 3600


def flops_per_token(cfg: RunConfig) -> float:
    """Return the useful matrix work per token of this run: the model's own, less the gradients of frozen weights, plus
    the adapters.

    An embedding table counts only where it makes logits, and only its tokens; padding and lookups cost nothing.
    """
    trained, frozen = Training.of(cfg).split(abstract_weights(cfg).model)

    def arrays(part: Any, *roles: Role) -> list[Any]:
        chosen = lambda declared, array: array if declared.is_matrix and declared.role in roles else None
        return jax.tree.leaves(map_declared(part, chosen))

    unneeded = sum(array.size for array in arrays(frozen, MATRIX, GATE))
    if (tables := arrays(frozen, TABLE)) and not arrays(trained, TABLE):
        unneeded += max(cfg.model.vocab_size * table.size // table.shape[0] for table in tables)
    added = sum(array.size for array in arrays(trained, ADAPTER))
    return architecture_of(cfg.model).flops_per_token(cfg.model, cfg.data.seq_len) - 2.0 * unneeded + 6.0 * added


def recomputed(cfg: RunConfig) -> float:
    """What remat adds to the useful matrix work, as a share of it: a third where all of the layers is done again.

    With dots, only the feed-forward layer's first two products and attention are. Of what is kept by name, those two
    alone are counted: they are the most that there is.
    """
    model, T = cfg.model, cfg.data.seq_len
    useful = architecture_of(model).flops_per_token(model, T)
    if cfg.train.remat == "none":
        return 0.0
    sizes = {length.axis: length.size for length in model.lengths()}
    output = 6.0 * model.vocab_size * sizes.get("embed", 0)
    kept = kept_names(cfg.train.kept)
    first = 4.0 * sizes.get("embed", 0) * sizes.get("ffn", 0) * model.depth
    if cfg.train.remat == "full":
        return ((useful - output) / 3 - (first if "ffn-up" in kept else 0)) / useful
    return 0.0 if "ffn-up" in kept else min(first / useful, 1 / 3)


def _item(cfg: RunConfig) -> int:
    """Bytes of a number that is computed with."""
    return 2 if cfg.train.dtype == "bfloat16" else 4


def _weights(cfg: RunConfig, memory: Memory) -> float:
    """Bytes of a device's share of the weights in the compute dtype, however they are kept."""
    return memory.parameters * _item(cfg) / (2 if cfg.precision.weights_dtype == "bfloat16" else 4)


def _gathered_bytes(cfg: RunConfig, mesh: Mapping[str, int], memory: Memory, slices: int) -> tuple[float, float]:
    """(bytes a device sends over its links a step for fsdp and data, those over the network between slices)."""
    fsdp, data, parts = mesh[GATHERED], mesh["data"], cfg.train.grad_accum
    whole = _weights(cfg, memory) * fsdp  # put together
    links = 3 * parts * whole * (fsdp - 1) / fsdp  # gathered forwards and backwards, gradients scattered
    within = data // slices
    links += parts * 2 * memory.gradients * (within - 1) / max(within, 1)
    return links, 2 * memory.gradients * (slices - 1) / slices


def speed(cfg: RunConfig, mesh: Mapping[str, int], machine: Machine, memory: Memory) -> Speed:
    """Of a configuration whose dtype and kernel are resolved."""
    chip, parts = machine.chip, cfg.train.grad_accum
    tokens = parts * cfg.data.batch_size * cfg.data.seq_len
    tp = math.prod(mesh[a] for a in RULES["time_split"])
    rows = cfg.data.batch_size // math.prod(mesh[a] for a in RULES["batch"])
    own_tokens = parts * rows * cfg.data.seq_len
    useful = flops_per_token(cfg) * tokens / machine.chips
    reading = reading_flops(cfg) * tokens / machine.chips
    counted = architecture_of(cfg.model).activations
    assert counted is not None  # `estimate` has asked
    execution = Execution(cfg.train.dtype, cfg.train.kept, cfg.train.attention)
    moved = parts * counted(cfg.model, execution, rows, cfg.data.seq_len, tp).moved
    # The update: the state is read and written, and gradients, which are kept as weights are, are read.
    moved += 2 * (memory.parameters + memory.optimizer) + memory.parameters
    moved += _LOGIT_BYTES * own_tokens * cfg.model.padded_vocab / tp
    if chip.platform == "gpu" and cfg.train.unroll == "no":  # a loop over layers copies what it keeps in and out
        moved += _LOOP_COPIES * parts * (memory.streams + memory.activations)
    width = next(length.size for length in cfg.model.lengths() if length.axis == "embed")
    moved += parts * _WEIGHT_PASSES * _weights(cfg, memory) * mesh[GATHERED]
    exchanged = _TP_EXCHANGES * cfg.model.depth * own_tokens * width * _item(cfg) * (tp - 1) / tp
    links, network = _gathered_bytes(cfg, mesh, memory, machine.slices)
    over_network = network / ((chip.network_gbps or math.inf) * 1e9)
    times = Times(
        compute=(useful * (1 + recomputed(cfg)) + reading) / (chip.tflops * 1e12 * MATMUL),
        memory=moved / (chip.memory_gbps * 1e9 * BANDWIDTH),
        exchange=exchanged / (chip.links_gbps * 1e9 * LINKS),
        gather=links / (chip.links_gbps * 1e9 * LINKS) + over_network / LINKS,
    )
    return Speed(times, tokens / times.step, useful / times.step / (chip.tflops * 1e12))
