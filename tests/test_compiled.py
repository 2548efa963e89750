"""A step that compiles in the background: used once it is there, and whoever waits for it learns what went wrong."""

import threading

import jax.numpy as jnp
import pytest

from nash_mhc.config.schema import MeshConfig
from nash_mhc.parallel.mesh import make_mesh
from nash_mhc.train.compiled import CompiledStep


def test_what_was_compiled_in_the_background_is_what_runs():
    seen = []

    def add(state, batch):
        seen.append(threading.current_thread() is threading.main_thread())
        return state + batch

    step = CompiledStep(add, make_mesh(MeshConfig(1, 1, 1)))
    step.begin(jnp.ones(3), jnp.ones(3))()
    assert step(jnp.ones(3), jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert (step.traces, seen) == (1, [False])
    assert step.seconds > 0


def test_what_goes_wrong_reaches_the_one_who_waits():
    def broken(state, batch):
        raise the_error

    the_error = ValueError("no such shape")
    wait = CompiledStep(broken, make_mesh(MeshConfig(1, 1, 1))).begin(jnp.ones(3), jnp.ones(3))
    with pytest.raises(ValueError, match="no such shape"):
        wait()
