"""Runs of a tiny model, made in this process, and what they leave."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
import small

from nash_mhc.checkpoint.run_folder import RunFolder
from nash_mhc.checkpoint.store import Store
from nash_mhc.model.architectures import architecture_of
from nash_mhc.train import run
from nash_mhc.train.callbacks import EachStep

RUN = small.config(optim__schedule="constant", optim__warmup_steps=0, train__total_steps=6, train__eval_interval=3)


def at(folder, cfg=RUN, *, each_step=None, evaluated=True, **changes):
    """Without an evaluation there is a program less to compile, for each mesh: where a test does not look at it."""
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, checkpoint_dir=str(folder), **changes))
    with pytest.MonkeyPatch.context() as patch:
        if not evaluated:
            patch.setattr("nash_mhc.train.inputs.open_held_out", lambda *_, **__: None)
        return run(cfg, quiet=True, callbacks=[EachStep(each_step)] if each_step else [])


class _Weights(eqx.Module):
    model: Any


def untrained_run(folder, cfg, model=None):
    """A folder like that of a run, whose one checkpoint holds fresh weights, or the model's, and nothing else:
    no step is compiled."""
    if model is None:
        model = jax.jit(lambda: architecture_of(cfg.model).init(cfg.model, key=jax.random.key(0)))()
    with Store(folder) as store:
        store.save(0, _Weights(model), {})
    return described_run(folder, cfg)


def described_run(folder, cfg):
    """What a run says of itself, without a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write({"run.json": json.dumps({"config": cfg.to_dict(), "rows": "none", "parameters": 0})})
    return folder


def drawn_run(folder, cfg):
    """The same with weights that numpy has drawn: not even an initialisation is compiled."""
    return untrained_run(folder, cfg, jax.device_put(small.generic_model(cfg.model)))


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_equal_states(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), **tolerance)


def losses(folder):
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens_seen"]) for row in rows(folder)]


def config(folder, **changes):
    return dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, checkpoint_dir=str(folder), **changes))
