"""A run that moves from mesh to mesh: the state it finds is the one that was saved,
the batches and losses are the same."""

import dataclasses

import jax
import numpy as np
import pytest
import small
from runs import RUN, at, rows
from training_process import arrays

from nash_mhc.parallel.params import named_leaves
from nash_mhc.runtime.compiled import CompiledStep
from nash_mhc.train.state import TrainState

MESHES = [(2, 2, 2), (1, 4, 2), (1, 1, 1)]
LOGGED = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, log_interval=1, eval_interval=0, keep_last=9))


class Seen:
    """Some steps on each mesh: the state that each leg began with, by name, and the rows of every step."""

    def __init__(self, folder, legs, steps):
        self.folder, self.found, self.batches = folder, [], []
        run_step = CompiledStep.__call__

        def called(step_fn, state, batch):
            if isinstance(state, TrainState):
                if len(self.found) <= len(self.batches) // steps:
                    self.found.append(named_leaves(jax.device_get(state)))
                self.batches.append([a.reshape(-1, a.shape[-1]) for a in jax.device_get(batch)[:4]])
            return run_step(step_fn, state, batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CompiledStep, "__call__", called)
            for leg, (shape, changes) in enumerate(legs):
                cfg = small.mesh_config(LOGGED, *shape)
                cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, batch_size=8 // changes.get("grad_accum", 1)))
                at(folder, cfg, total_steps=steps * (leg + 1), resume="must" if leg else "never", evaluated=False, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return Seen(tmp_path_factory.mktemp("alone") / "run", [((1, 1, 1), {})], 2 * len(MESHES))


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    # On the second mesh the batch is split into parts as well.
    legs = [(shape, {"grad_accum": 2} if shape == MESHES[1] else {}) for shape in MESHES]
    return Seen(tmp_path_factory.mktemp("moved") / "run", legs, 2)


def test_the_state_on_each_mesh_is_bit_equal_to_the_saved_one(moved):
    assert len(moved.found) == len(MESHES)
    for leg, found in enumerate(moved.found[1:], 1):
        saved = arrays(moved.folder, 2 * leg)
        assert set(found) == set(saved)
        for name in saved:
            np.testing.assert_array_equal(found[name], saved[name], err_msg=name)


def test_every_step_reads_the_same_sequences(moved, alone):
    assert len(moved.batches) == len(alone.batches) == 2 * len(MESHES)
    for ours, theirs in zip(moved.batches, alone.batches, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_losses_match_those_of_one_device(moved, alone):
    ours, theirs = rows(moved.folder), rows(alone.folder)
    assert [row["step"] for row in ours] == list(range(1, 2 * len(MESHES) + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["tokens_seen"] == b["tokens_seen"]
