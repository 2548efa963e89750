"""The memory of a reservoir: known cases, bounds, and agreement with the model's recurrence."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_files import make_run, row

from nash_mhc.config import presets
from nash_mhc.kits.reservoir import memory as reservoir_memory
from nash_mhc.kits.reservoir import model as reservoir
from nash_mhc.kits.reservoir.memory import memory
from nash_mhc.kits.reservoir.settings import ReservoirConfig
from nash_mhc.report.__main__ import main
from nash_mhc.report.contents import contents, memory_facts, open_run

RING = ReservoirConfig(width=8, units=12, ffn=16, leak=1.0, slowest_leak=1.0)  # no leaks: one ring
SPREAD = dataclasses.replace(RING, slowest_leak=0.05, radius=0.9)
TANH = dataclasses.replace(SPREAD, unit="tanh", ring=6)


@pytest.mark.parametrize("radius", [0.9, 0.99])
def test_a_ring_remembers_as_many_inputs_as_it_has_units(radius):
    """Twelve complex units of one ring are a ring of twelve real places, twice: what went in comes round, weaker, and
    is mixed with what came 12 tokens later. Of delay k it keeps (1 - r^24) r^(24 floor(k / 12)); 0 is no memory."""
    cfg = dataclasses.replace(RING, radius=radius)
    found, again = memory(cfg), radius**24
    assert found.capacity == pytest.approx(12 - (1 - again), abs=0.1)
    assert found.units == 24
    for delay, share in found.curve:
        assert share == pytest.approx((1 - again) * again ** (delay // 12), abs=0.01), delay


def test_a_shorter_memory_is_a_smaller_one_and_none_is_above_the_units():
    half, most = (memory(dataclasses.replace(RING, radius=radius)) for radius in (0.5, 0.99))
    # What is 10 tokens old has shrunk to 2^-10, which the error of a state hides.
    assert half.capacity < 11 < most.capacity and half.curve[-1][0] <= 12
    shares = [share for _, share in half.curve]
    assert shares == sorted(shares, reverse=True)
    few = [memory(dataclasses.replace(SPREAD, units=units, slowest_leak=0.5)) for units in (1, 2, 4, 8)]
    assert all(0.5 < each.capacity <= each.units for each in few)
    assert [each.capacity for each in few] == sorted(each.capacity for each in few)


def linear_step(cfg, units):
    m_N = reservoir.multipliers(cfg)[:units]

    def step(h, b):
        real, imaginary = h[..., 0, :], h[..., 1, :]
        parts = (m_N.real * real - m_N.imag * imaginary, m_N.real * imaginary + m_N.imag * real)
        return np.stack(parts, axis=-2) + b

    return step


def test_the_closed_form_agrees_with_a_measured_readout(monkeypatch):
    monkeypatch.setattr(reservoir_memory, "next_state", linear_step)
    for cfg in (dataclasses.replace(RING, radius=0.5), SPREAD):
        by_formula = reservoir_memory.linear_recall(cfg)
        measured_K = reservoir_memory.measured_recall(cfg)
        assert measured_K.sum() == pytest.approx(by_formula[0], rel=0.05)
        near = by_formula[1][by_formula[1] < 20]
        np.testing.assert_allclose(measured_K[near - 1], by_formula[2][: len(near)], atol=0.05)


@pytest.mark.parametrize("cfg", [SPREAD, TANH], ids=["linear", "tanh"])
def test_the_states_are_those_of_the_model(cfg):
    driven_T2N = np.random.default_rng(0).normal(size=(50, 2, cfg.units))
    along = jnp.asarray(np.moveaxis(driven_T2N, 0, 1)[:, None], jnp.float32)
    states = jax.jit(lambda along: reservoir.states(cfg, along, jnp.ones((1, 50), jnp.int32)))
    want = np.asarray(states(along))[:, 0]
    next_state = linear_step if cfg.unit == "linear" else reservoir_memory.next_state
    after, h_2N = next_state(cfg, cfg.units), np.zeros((2, cfg.units))
    for t, b_2N in enumerate(driven_T2N):
        h_2N = after(h_2N, b_2N)
        np.testing.assert_allclose(h_2N, want[:, t], atol=1e-5)
    # The input of one channel alone, as in the model.
    u_11D = jnp.zeros((1, 1, cfg.width)).at[0, 0, 0].set(cfg.width**0.5)
    heard = reservoir.ReservoirLayer.driven(None, u_11D, cfg, reservoir.input_matrix(cfg, 0))
    np.testing.assert_allclose(reservoir_memory.channel_input(cfg), heard[:, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("cfg", [RING, SPREAD, dataclasses.replace(SPREAD, leak=0.3)], ids=["ring", "spread", "slow"])
def test_two_states_approach_at_the_effective_radius(cfg):
    found = memory(cfg)
    drawn = np.random.default_rng(1)
    h = np.exp(2j * np.pi * drawn.uniform(size=cfg.units)) * np.array([[1], [-1]])  # as far apart in every unit
    apart = []
    for _ in range(2000):
        apart.append(np.linalg.norm(h[0] - h[1]))
        h = reservoir.multipliers(cfg) * h + drawn.normal(size=cfg.units)
    apart = np.asarray(apart) / apart[0]
    assert apart[found.forgets] < 0.01 <= apart[found.forgets - 1]
    late = np.flatnonzero(apart > 1e-10)[-1]
    assert (apart[late] / apart[late // 2]) ** (1 / (late - late // 2)) == pytest.approx(found.radius, rel=2e-3)


def test_forgetting_of_tanh_units():
    # Neighbours hardly hear each other: what is left of a state is 1 - leak, whatever comes in.
    alone = memory(dataclasses.replace(TANH, radius=1e-6, leak=0.2, slowest_leak=0.2))
    assert alone.radius == pytest.approx(0.8, abs=1e-4)
    assert alone.forgets == np.ceil(np.log(0.01) / np.log(0.8))
    coupled = memory(TANH)  # a tanh never stretches: at most what its linear form would keep
    assert 1 - 0.05 < coupled.radius < 1 - 0.05 * (1 - 0.9)
    assert 1 < coupled.capacity < memory(SPREAD).capacity


def test_a_diverging_reservoir_has_no_capacity():
    with pytest.warns(UserWarning, match="radius 1.01: .* only below 1"):
        cfg = dataclasses.replace(RING, radius=1.01)
    found = memory(cfg)
    assert (found.capacity, found.forgets, found.curve) == (None, None, [])
    assert found.radius == pytest.approx(1.01)


def test_the_report_shows_it(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path, [row(1), row(2)], remembers=memory(SPREAD)._asdict())
    facts = memory_facts(open_run(folder))
    found = memory(SPREAD)
    assert facts["memory capacity of a layer"] == f"{found.capacity:.1f} of 24 real units"
    assert facts["effective spectral radius"] == f"{found.radius:.5f}"
    assert facts["initial state forgotten (to 1%)"] == f"after {found.forgets:,} tokens"
    shown = contents(open_run(folder))
    assert shown["memory"] == facts and shown["curve"] == [list(point) for point in found.curve]
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    assert main() == 0
    out = capsys.readouterr().out
    assert f"memory capacity of a layer       {facts['memory capacity of a layer']}" in out
    page = (folder / "report.html").read_text()
    assert json.dumps(facts)[1:40] in page.replace('":"', '": "') and "Memory of a layer" in page
    assert memory_facts(open_run(make_run(tmp_path / "other", [row(1)]))) == {}


def test_the_presets_are_measured_in_seconds_and_larger_ones_remember_more():
    found = [memory(presets.run(size, "reservoir").model) for size in ("tiny", "small")]
    assert 80 < found[0].capacity < 90
    assert 120 < found[1].capacity < 130
