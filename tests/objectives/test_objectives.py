"""Objectives can be registered; the names of their sums determine what is logged and evaluated."""

import dataclasses
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from runs import RUN, at, rows

from nash_mhc.config.schema import ConfigError, ObjectiveConfig
from nash_mhc.objectives import registry
from nash_mhc.objectives.base import Aux, Sum, means
from nash_mhc.train.inputs import resolve
from nash_mhc.train.step import make_objective


def with_objective(cfg, name, **settings):
    return dataclasses.replace(cfg, objective=ObjectiveConfig(name=name, **settings))


def test_the_parts_of_a_loss_are_named_and_add_up():
    cfg = small.nash_config(optim__z_loss=1e-3, optim__sparsity=1e-2)
    # With scales, for the sparsity penalty; streams and the convolution do not affect the loss.
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, residual="plain", conv_taps=0))
    cfg = small.mesh_config(cfg, 2, 2, 2)
    mesh = small.make_mesh(cfg.mesh)
    model, batch = small.start(cfg, mesh).model, small.to_device(small.random_rows(cfg, 0), mesh)
    # With gradients, as in a step; the backward pass adds nothing to the reports.
    objective = make_objective(cfg)
    of_norm = lambda norm, model, batch: objective(dataclasses.replace(model, norm=norm), batch)
    with jax.set_mesh(mesh):
        part = jax.tree.map(lambda a: a[0], batch)
        _, aux = jax.jit(jax.grad(of_norm, has_aux=True))(model.norm, model, part)
    row = {name: float(mean) for name, mean in means(aux.sums).items()}
    parts = [row[name] for name in ("loss", "loss/z", "loss/sparsity")]
    assert all(abs(part) > 1e-6 for part in parts)
    assert row["objective"] == pytest.approx(sum(parts), rel=1e-5)


def every_second(cfg, execution):
    """An objective with sums over even positions and over sequences, and a health report that is a mean."""

    def objective(model, batch):
        x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
        counts_BT = batch.weights * (jnp.arange(batch.weights.shape[1]) % 2 == 0)[None]
        apart_BTD = x_BTD - 5.0 * model.unembed_VD[batch.targets]
        loss, weight = jnp.sum(counts_BT[..., None] * apart_BTD**2), jnp.sum(counts_BT)
        filled_B = jnp.sum(batch.weights, axis=1)
        sums = {"loss": Sum(loss, weight), "filled": Sum(jnp.sum(filled_B), jnp.float32(filled_B.size))}
        rms_B = jnp.sqrt(jnp.mean(x_BTD**2, axis=(1, 2)))
        return loss, Aux(sums, model.health(report) | {"rms": jnp.stack([rms_B.mean(), 1.0])})

    return objective


@pytest.fixture
def another(monkeypatch):
    monkeypatch.setattr(registry, "OBJECTIVES", registry.OBJECTIVES.copy())
    registry.register("every_second", every_second)


def test_names_and_weights_of_a_registered_objective_are_those_of_rows_and_evaluations(another, tmp_path):
    cfg = with_objective(RUN, "every_second")
    result = at(tmp_path / "run", cfg)
    told = rows(result.folder)[-1]
    assert {"loss", "filled", "tokens_seen"} <= set(told)
    assert not {name for name in told if name.startswith(("loss/", "accuracy", "weight/"))}
    assert told["loss"] < rows(result.folder)[0]["loss"]
    assert set(rows(result.folder, "eval.jsonl")[-1]) == {"step", "eval/loss", "eval/filled"}
    assert 0 < result.evaluation["eval/filled"] <= cfg.data.seq_len
    values = json.loads((result.folder / "run.json").read_text())["config"]["objective"]
    assert values == {"name": "every_second"}


def test_a_mean_over_steps_weighs_each_by_what_its_sum_was_over(another):
    from small import small_meter

    cfg = with_objective(small.config(), "every_second")
    batches = [small.random_rows(cfg, seed) for seed in range(3)]
    batches[1].weights[:, 2:] = 0.0
    _, history, _ = small.train(cfg, batches)
    row = small_meter(history).row()
    for name in ("loss", "filled"):
        weights = [step[f"weight/{name}"] for step in history]
        assert row[name] == pytest.approx(np.average([step[name] for step in history], weights=weights), rel=1e-12)
    assert len({step["weight/loss"] for step in history}) > 1
    assert {step["weight/filled"] for step in history} == {8.0}


def test_accumulated_parts_of_a_registered_objective_add_up(another):
    cfg = with_objective(small.config(), "every_second")
    whole = [small.random_rows(cfg, seed) for seed in range(2)]
    parts = [type(rows)(*(a.reshape(4, 2, -1) for a in rows)) for rows in whole]
    split = dataclasses.replace(
        cfg, data=dataclasses.replace(cfg.data, batch_size=2), train=dataclasses.replace(cfg.train, grad_accum=4)
    )
    in_parts, at_once = small.train(split, parts), small.train(cfg, whole)
    small.assert_same_run(in_parts, at_once)
    assert [row["health/rms"][1] for row in in_parts[1]] == [1.0, 1.0]  # not added up


def test_another_objective_under_the_same_name_is_another_program(another):
    """As in a notebook whose cell is edited and run again."""
    cfg = with_objective(small.config(), "every_second")
    rows_ = [small.random_rows(cfg, 0)]
    before = small.train(cfg, rows_)[1][0]["loss"]

    def doubled(cfg, execution):
        inner = every_second(cfg, execution)

        def objective(model, batch):
            loss, aux = inner(model, batch)
            return 2 * loss, aux._replace(sums=aux.sums | {"loss": Sum(2 * loss, aux.sums["loss"].weight)})

        return objective

    registry.register("every_second", doubled)
    assert small.train(cfg, rows_)[1][0]["loss"] == pytest.approx(2 * before, rel=1e-5)


class Pairs(NamedTuple):
    """Examples with a second answer."""

    inputs: np.ndarray
    targets: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    rejected: np.ndarray  # targets that must be less likely


def prefers(cfg, execution):
    """Return the softplus of the rejected minus the chosen log-likelihood."""

    def objective(model, batch):
        x_BTD, report = model.hidden(batch.inputs, batch.segments, execution)
        score = lambda targets_BT: jnp.sum(x_BTD * model.unembed_VD[targets_BT], axis=(1, 2))
        loss_B = jax.nn.softplus(score(batch.extras["rejected"]) - score(batch.targets))
        rows = jnp.float32(loss_B.size)
        return jnp.sum(loss_B), Aux({"loss": Sum(jnp.sum(loss_B), rows)}, model.health(report))

    return objective


def test_an_objective_sees_the_fields_that_its_examples_have_of_their_own(another):
    registry.register("prefers", prefers)
    cfg = with_objective(small.mesh_config(small.config(train__grad_accum=2), 8, 1, 1), "prefers")
    rows_ = small.random_rows(cfg, 0)
    pairs = Pairs(*rows_, (rows_.targets + 1) % cfg.model.vocab_size)
    _, history, _ = small.train(cfg, [pairs] * 4)
    assert history[-1]["loss"] < history[0]["loss"] < 10
    _, same, _ = small.train(cfg, [pairs._replace(rejected=rows_.targets)])
    assert same[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)  # equally likely


def test_an_unknown_objective_is_one_line(another):
    with pytest.raises(ConfigError, match=r"--objective nxt_token: unknown objective; did you mean next_token\?"):
        resolve(with_objective(small.config(), "nxt_token"))
    with pytest.raises(ConfigError, match="xyzzy") as refused:
        resolve(with_objective(small.config(), "xyzzy"))
    assert all(name in str(refused.value) for name in ("next_token", "distill", "puzzle", "every_second"))
