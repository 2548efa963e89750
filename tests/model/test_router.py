"""A layer of experts with a router, added from outside of the package: its auxiliary loss has a weight of its own, and
its hook updates a bias inside the compiled step."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from bigram import BIGRAM, Bigram, BigramConfig

from nash_mhc.config.fields import key
from nash_mhc.config.schema import ARCHITECTURES
from nash_mhc.model import architectures
from nash_mhc.model.parts import init_matrix
from nash_mhc.parallel import sharding
from nash_mhc.parallel.params import GATE, STATE, param

EXPERTS = 4


@dataclass(frozen=True)
class RoutedConfig(BigramConfig):
    architecture = "routed"

    balance: float = key(0.1, "weight of the loss that balances the load of the experts", low=0)
    bias_rate: float = key(0.01, "change of an expert's bias per update", low=0)


class Router(eqx.Module):
    """Chooses one expert per token, by score plus bias. The bias moves towards experts with a low load."""

    gate_DE: jax.Array = param("embed", "experts", role=GATE)
    bias_E: jax.Array = param("experts", role=STATE)
    rate: float = eqx.field(static=True)

    def __call__(self, x_BTD):
        scores_BTE = jax.nn.softmax(jnp.einsum("btd,de->bte", x_BTD, self.gate_DE))
        chosen_BTE = jax.nn.one_hot(jnp.argmax(scores_BTE + self.bias_E[None, None], axis=-1), EXPERTS)
        return scores_BTE, chosen_BTE

    def after_update(self, step, applied, health):
        bias_E = self.bias_E + self.rate * jnp.sign(1 / EXPERTS - health["load"])
        return dataclasses.replace(self, bias_E=jnp.where(applied, bias_E, self.bias_E))


class Routed(Bigram):
    router: Router
    expert_EDD: jax.Array = param("experts", "embed", "features")

    @staticmethod
    def init(cfg, *, key):
        first, gate, experts = jax.random.split(key, 3)
        plain = Bigram.init(cfg, key=first)
        router = Router(init_matrix(gate, (cfg.width, EXPERTS), cfg.width), jnp.zeros(EXPERTS), cfg.bias_rate)
        weights = init_matrix(experts, (EXPERTS, cfg.width, cfg.width), cfg.width)
        return Routed(plain.embed_VD, plain.output_VD, cfg, router, weights)

    def hidden(self, tokens_BT, segments_BT=None, execution=None):
        x_BTD, _ = Bigram.hidden(self, tokens_BT, segments_BT, execution)
        scores_BTE, chosen_BTE = self.router(x_BTD)
        x_BTD = x_BTD + jnp.einsum("btd,edf,bte->btf", x_BTD, self.expert_EDD, scores_BTE * chosen_BTE)
        return x_BTD, (scores_BTE.mean((0, 1)), chosen_BTE.mean((0, 1)))

    def health(self, report):
        return {"load": jax.lax.stop_gradient(report[1])}

    def auxiliary_losses(self, report):
        return {"balance": EXPERTS * jnp.sum(report[0] * jax.lax.stop_gradient(report[1]))}


@pytest.fixture(autouse=True)
def routed(monkeypatch):
    for axis in ("experts", "features"):
        monkeypatch.setitem(sharding.RULES, axis, ())
    known = dict(ARCHITECTURES)
    monkeypatch.setattr(architectures, "_KNOWN", dict(architectures._KNOWN))
    own = BIGRAM._replace(init=Routed.init, auxiliary_weights=lambda run: {"balance": run.model.balance})
    architectures.register(RoutedConfig, own)
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(known)


def config(**changes):
    cfg = small.config(train__grad_accum=2, data__batch_size=8)
    return dataclasses.replace(cfg, model=RoutedConfig(**changes))


def batches(count):
    cfg = small.config(train__grad_accum=2, data__batch_size=8)
    return [small.random_rows(cfg, seed) for seed in range(count)]


def test_the_auxiliary_loss_has_its_weight_and_its_name():
    found = {}
    for weight in (0.0, 0.1):
        cfg = config(balance=weight)
        _, found[weight], _ = small.train(cfg, batches(2))
    first = found[0.1][0]
    assert found[0.0][0]["loss/balance"] == 0.0 and "loss/sparsity" not in first
    assert first["loss/balance"] > 0.09  # 0.1 where the load is even, more where it is not
    assert first["objective"] == pytest.approx(first["loss"] + first["loss/balance"], rel=1e-6)
    assert found[0.1][1]["loss"] != found[0.0][1]["loss"]  # its gradient was added


def test_the_hook_moves_the_bias_by_the_load_and_not_in_a_skipped_step():
    cfg = config()
    rows = batches(4)
    rows[1].weights[:] = np.nan
    state, history, _ = small.train(cfg, rows)
    assert [row["skipped"] for row in history] == [0, 1, 0, 0]
    moved = sum(np.sign(1 / EXPERTS - np.asarray(history[at]["health/load"])) for at in (0, 2, 3))
    np.testing.assert_allclose(state.model.router.bias_E, cfg.model.bias_rate * moved, atol=1e-7)
    assert np.abs(moved).max() > 0


def test_state_is_neither_trained_nor_averaged_and_is_the_same_on_a_mesh():
    cfg = dataclasses.replace(config(), optim=dataclasses.replace(config().optim, ema_decay=0.5))
    whole, spread = (small.train(c, batches(2)) for c in (cfg, small.mesh_config(cfg, 8, 1, 1)))
    small.assert_same_run(spread, whole)
    np.testing.assert_array_equal(spread[0].model.router.bias_E, whole[0].model.router.bias_E)
    assert whole[0].ema.router.bias_E is None
    np.testing.assert_array_equal(whole[0].averaged_model.router.bias_E, whole[0].model.router.bias_E)
