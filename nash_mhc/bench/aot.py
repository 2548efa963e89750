"""`bench compile`: the real train step compiled for a TPU topology that is not here, with its memory figures."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from nash_mhc.config.schema import ConfigError, RunConfig
from nash_mhc.model.architectures import count_parameters
from nash_mhc.model.device_settings import for_platform
from nash_mhc.parallel.mesh import check_fit, make_mesh
from nash_mhc.train.device_batches import abstract_batch
from nash_mhc.train.state import sharded_abstract_state
from nash_mhc.train.step import compile_train_step

_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def communicating(text: str) -> str:
    """A program's text without the collectives of one device each: they move nothing;
    only a CPU's compiler leaves them in."""
    return "\n".join(line for line in text.splitlines() if not re.search(r"replica_groups=\{\{\d+\}", line))


def count_collectives(compiled: Any) -> dict[str, int]:
    """Collectives in the program text by kind; one inside a loop counts once."""
    return dict(sorted(Counter(_COLLECTIVE.findall(communicating(compiled.as_text()))).items()))


def _tpu_mesh(cfg: RunConfig, topology: str) -> Mesh:
    """Of a TPU that is not here."""
    axes, shape = tuple(cfg.mesh.axes), tuple(cfg.mesh.axes.values())
    try:
        # Hosts have four chips each, but for the one that has a single one.
        single: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if re.fullmatch(r"[^:]+:1(x1)*", topology) else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **single)
    except Exception as error:  # the library raises many kinds; the user needs the reason, not the kind
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--topology {topology}: cannot be described here ({reason}); it needs libtpu and a name like v6e:2x4"
        ) from error
    if math.prod(shape) != len(described.devices):
        raise ConfigError(f"--topology {topology} has {len(described.devices)} chips; the mesh axes must multiply to that")
    mesh = topologies.make_mesh(described, shape, axes)
    return type(mesh)(mesh.devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def bench_compile(cfg: RunConfig, topology: str) -> dict[str, Any]:
    """Compiles for `topology` (for instance v6e:2x4); needs the TPU compiler library, not a TPU.

    `cpu` needs neither: as many emulated devices as the mesh has, for what does not depend on the chip.
    """
    with contextlib.nullcontext() if topology == "cpu" else hidden("libtpu", "TPU_STDERR_LOG_LEVEL"):
        return _compiled(cfg, topology)


def _compiled(cfg: RunConfig, topology: str) -> dict[str, Any]:
    emulated = dataclasses.replace(cfg.mesh, platform="cpu")
    mesh = make_mesh(emulated) if topology == "cpu" else _tpu_mesh(cfg, topology)
    check_fit(cfg, mesh.shape)
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
        # What lies there at one moment; the figure above has the holes between, too. A program whose moment is too
        # large for the chip is refused by the TPU's compiler.
        "live_gib_per_chip": memory.peak_memory_in_bytes / 2**30,
        "collectives": ", ".join(f"{kind} {count}" for kind, count in count_collectives(compiled).items()),
    }


@contextlib.contextmanager
def hidden(library: str, unless: str) -> Iterator[None]:
    """Replace what comes to stderr meanwhile with its number of lines, unless that environment variable is set.

    By the number of the file, which C++ writes to: nothing else may write there meanwhile.
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
                print(f"{library} wrote {lines} lines of its own, which are hidden; {unless}=0 shows them", file=sys.stderr)
