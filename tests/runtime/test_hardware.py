"""Peak FLOP/s, the denominator of MFU, on a busy machine."""

import itertools
import os
import time
from pathlib import Path

import jax
import pytest

from nash_mhc.config.schema import MeshConfig
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.runtime import hardware


def test_a_cpu_has_no_peak():
    assert hardware.peak_flops(make_mesh(MeshConfig()), "float32") is None
    assert hardware.peak_flops(make_mesh(MeshConfig()), "bfloat16", measured_rate=1e12) is None


def test_a_busy_cpu_is_measured_by_cpu_time(monkeypatch):
    """Two products that took a second of two processors' time are as fast, however long they had to wait for it."""
    clock = itertools.count()
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    assert hardware.matmul_rate("float32", jax.devices("cpu")[0], seconds=0.05) == pytest.approx(2 * 1024**3 / (1 / 2 / 2))


@pytest.mark.parametrize(("granted", "wanted"), [("max 100000", 8), ("150000 100000", 1.5), ("9900000 100000", 8), (None, 8)])
def test_a_container_may_grant_fewer_cores(monkeypatch, granted, wanted):
    def read(path):
        if granted is None:
            raise FileNotFoundError(path)
        return granted

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(Path, "read_text", read)
    assert hardware.cores() == wanted
