"""Verify the memory estimate of a candidate: compile the real train step ahead of time, in a separate process.

For a TPU, this needs only its compiler library. Otherwise it compiles for emulated CPU devices in the same mesh, and
compares with the estimate for that program.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from nash_mhc.config.parsing import as_flags
from nash_mhc.config.schema import KIT_SECTIONS, ConfigError
from nash_mhc.estimate.candidates import Candidate
from nash_mhc.estimate.memory import estimate
from nash_mhc.model.architectures import for_platform
from nash_mhc.objectives.registry import named_objective
from nash_mhc.runtime.chips import Machine

_MAX_CHIPS = 256
_TIMEOUT_S = 1800
_OF_THE_MACHINE = ("train.dtype", "train.attention", "train.unroll", "mesh.platform", "mesh.num_devices")
_LEFT_OUT = "without bfloat16, and without the accelerator's attention kernels, fusions and layouts"


def _compile(flags: list[str], topology: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "nash_mhc.bench", "compile", *flags, "--topology", topology, "--json", "-"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--method compile: the compiler took more than {_TIMEOUT_S} s; use --method estimate") from None
    if done.returncode:
        last = (done.stderr.strip() or "no reason was given").splitlines()[-1].removeprefix("error: ")
        raise ConfigError(f"--method compile: {last}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def verify(candidate: Candidate, given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the memory by the compiler and by the estimate; raise ConfigError if it cannot be compiled."""
    if machine.chips > _MAX_CHIPS:
        raise ConfigError(
            f"--method compile supports up to {_MAX_CHIPS} chips, and {machine.name} has {machine.chips}; use --method estimate"
        )
    cfg, without = candidate.cfg, ""
    if named_objective(cfg.objective.name).feed is not None:  # compile only the step
        owned = ["objective.", *(f"{name}." for name, kind in KIT_SECTIONS.items() if kind.of_objective is not None)]
        given = {key: value for key, value in given.items() if not key.startswith(tuple(owned))}
        cfg, without = cfg.with_next_token(), ", without teacher"
    flags = as_flags({**given, **candidate.settings})
    mesh = "x".join(map(str, candidate.mesh.values()))
    label = f"{mesh} {cfg.train.kept}, {cfg.train.grad_accum} x {cfg.data.batch_size} sequences{without}"
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    if machine.chip.platform == "tpu" and machine.slices == 1 and has_libtpu:
        topology, computed = f"{machine.chip.name}:{machine.topology}", estimate(cfg, candidate.mesh).total
        what, left_out = f"compiled for {topology}", ""
    else:
        topology = "cpu"
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, dtype="auto", attention="auto"))
        computed = estimate(for_platform(cfg, "cpu"), candidate.mesh).total
        flags = as_flags({key: v for key, v in ({**given, **candidate.settings}).items() if key not in _OF_THE_MACHINE})
        what, left_out = f"compiled for {machine.chips} emulated CPU device{'s' * (machine.chips > 1)} in float32", _LEFT_OUT
    figures = _compile(flags, topology)
    # The TPU compiler accepts a program by its peak of live memory; fragmentation comes on top of that.
    gib, own = figures["peak_gib_per_chip" if topology == "cpu" else "live_gib_per_chip"], computed / 2**30
    sentence = f"{label}: {gib:.3g} GiB per device {what}, estimate for that program {own:.3g} ({own / gib - 1:+.0%})"
    sentence += f" in {figures['compile_s']:.0f} s" + (f"; {left_out}" if left_out else "")
    return {
        **candidate.settings, "compiled_for": topology, "compiled_gib": gib, "computed_gib": own, "left_out": left_out,
        "collectives": figures["collectives"], "compile_s": figures["compile_s"], "sentence": sentence, "figures": "compiled",
    }  # fmt: skip
