"""Value embeddings: a second embedding of each token, added to the values of attention (arXiv 2410.17897)."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from nash_mhc.config.schema import ModelConfig
from nash_mhc.model.parts import embed, init_matrix, init_small
from nash_mhc.parallel.params import GATE, VALUE, param
from nash_mhc.parallel.sharding import constrain

_CHANNELS = 12  # the first channels of a token, which determine its gates
_INITIAL_GATE = 0.02


class ValueEmbedding(eqx.Module):
    """The table of one layer, and a gate for each key and value head. A table is looked up, so it costs no FLOPs."""

    table_VE: Float[Array, "V E"] = param("vocab", "embed", role=VALUE, cast=False)
    gate_JK: Float[Array, "J K"] = param("vector", "kv_heads", role=GATE)

    @staticmethod
    def init(cfg: ModelConfig, *, key: PRNGKeyArray) -> ValueEmbedding:
        table, gate = jax.random.split(key)
        return ValueEmbedding(
            init_matrix(table, (cfg.padded_vocab, cfg.kv_heads * cfg.head_dim), cfg.width),
            jnp.abs(init_small(gate, (min(_CHANNELS, cfg.width), cfg.kv_heads), _INITIAL_GATE)),
        )


class TokenValues(NamedTuple):
    """A layer's value embedding and the tokens to look up."""

    embedding: ValueEmbedding
    tokens_BT: Int[Array, "B T"]

    def of(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T K H"]:
        """Return what to add to the values of these tokens, whose input to attention is x."""
        gate_JK = self.embedding.gate_JK.astype(x_BTD.dtype)
        J, K = gate_JK.shape
        rows_BTE = embed(self.embedding.table_VE, self.tokens_BT, x_BTD.dtype)
        rows_BTKH = rows_BTE.reshape(*rows_BTE.shape[:2], K, -1)
        gates_BTK = 3 * jax.nn.sigmoid(jnp.einsum("btj,jk->btk", x_BTD[..., :J], gate_JK))
        return constrain(gates_BTK[..., None] * rows_BTKH, "batch", "time", "kv_heads", "head_dim")


def of_tokens(embedding: ValueEmbedding | None, tokens_BT: Int[Array, "B T"]) -> TokenValues | None:
    return None if embedding is None else TokenValues(embedding, tokens_BT)


def of_group(embeddings: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Split the stack of all layers' value embeddings into one stack per layer of a group; None without them."""
    size, index, each = sum(kind.values for kind in kinds), 0, []
    for kind in kinds:
        each.append(jax.tree.map(lambda a, index=index: a[index::size], embeddings) if kind.values else None)
        index += kind.values
    return tuple(each)
