"""A feed adds fields to batches; it may compute them with the current model."""

import dataclasses

import jax
import jax.numpy as jnp
from runs import RUN, at, rows

from nash_mhc.config.schema import ObjectiveConfig
from nash_mhc.objectives import registry
from nash_mhc.objectives.base import Feed, OpenFeed, Sum
from nash_mhc.objectives.next_token import make_next_token
from nash_mhc.parallel.sharding import named_sharding


class NormFeed(Feed):
    def open(self, cfg, source, tokenizer, mesh):
        return cfg, OpenNormFeed(mesh)


class OpenNormFeed(OpenFeed):
    """Adds the norm of the current model's embeddings to every microbatch."""

    def __init__(self, mesh):
        self._sharding = named_sharding(mesh)
        norm = lambda model, batch: jnp.broadcast_to(jnp.linalg.norm(model.embed_VD), batch.inputs.shape[:1])
        self._norm = jax.jit(norm, out_shardings=self._sharding)

    def abstract(self, source, batch):
        shape = jax.ShapeDtypeStruct(batch.inputs.shape[:1], jnp.float32, sharding=self._sharding)
        return batch._replace(extras={"norm": shape})

    def reader(self, source):
        return lambda model, batch: batch._replace(extras={"norm": self._norm(model, batch)})


def make(cfg, execution):
    next_token = make_next_token(cfg, execution)

    def objective(model, batch):
        loss, aux = next_token(model, batch)
        return loss, aux._replace(sums=aux.sums | {"norm": Sum(batch.extras["norm"], jnp.ones(()))})

    return objective


def test_a_feed_reads_with_the_current_model(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "OBJECTIVES", registry.OBJECTIVES.copy())
    registry.register("normed", make, feed=NormFeed())
    cfg = dataclasses.replace(RUN, objective=ObjectiveConfig(name="normed"))
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, learning_rate=1e-2))
    run = at(tmp_path / "run", cfg, total_steps=3, log_interval=1, eval_interval=3)
    norms = [row["norm"] for row in rows(run.folder)]
    assert len(set(norms)) == 3  # the weights change in every step
    assert rows(run.folder, "eval.jsonl")[-1]["eval/norm"] not in norms  # evaluated after the last step
