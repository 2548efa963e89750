"""The decoding cache of keys and values, one array for a stack of layers.

The scan over layers carries these arrays, and each layer updates one row in place. As scanned inputs and outputs, they
would be copied for every token. All sequences of a batch are at the same position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from nash_mhc.ops.attention_io import AttentionOutput


class TokenAt(NamedTuple):
    """Indices of the layer in its stack and of the token."""

    layer: Int[Array, ""]
    position: Int[Array, ""]


class KeyValues(eqx.Module):
    """Rotated keys, and values, of one scale. Row i has index i % S, so a window needs S rows."""

    k_LBKSH: Float[Array, "L B K S H"]
    v_LBKSH: Float[Array, "L B K S H"]

    @staticmethod
    def empty(layers: int, batch: int, heads: int, rows: int, head_dim: int, dtype: Any) -> KeyValues:
        # Rows of a head are contiguous, as they are read.
        k, v = (jnp.zeros((layers, batch, heads, rows, head_dim), dtype) for _ in "kv")
        return KeyValues(k, v)

    def write(self, layer: Array, i: Array, k_B1KH: Array, v_B1KH: Array) -> KeyValues:
        """Return the cache with row i of one layer written."""
        index = i % self.k_LBKSH.shape[3]
        put = lambda stack, row_B1KH: write_row(stack, layer, jnp.swapaxes(row_B1KH, 1, 2), 3, index)
        return KeyValues(put(self.k_LBKSH, k_B1KH), put(self.v_LBKSH, v_B1KH))

    def attend(self, q_B1NH: Float[Array, "B 1 N H"], layer: Array, i: Array, *, null: bool = False) -> AttentionOutput:
        """Attend with one query to the rows up to row i, and with `null` to a key and value of zeros, too."""
        k_BKSH, v_BKSH = layer_of(self.k_LBKSH, layer), layer_of(self.v_LBKSH, layer)
        (B, _, N, H), (_, K, S, _) = q_B1NH.shape, k_BKSH.shape
        q_BKGH = (q_B1NH * jnp.asarray(H**-0.5, q_B1NH.dtype)).reshape(B, K, N // K, H)
        scores_BKGS = jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32)
        # Once every row is written, all are visible: the ring buffer holds exactly the window.
        scores_BKGS = jnp.where((jnp.arange(S) <= i)[None, None, None], scores_BKGS, -jnp.inf)
        lse_BKG = jax.nn.logsumexp(scores_BKGS, axis=-1)
        lse_BKG = jnp.logaddexp(lse_BKG, 0.0) if null else lse_BKG
        weights_BKGS = jnp.exp(scores_BKGS - lse_BKG[..., None]).astype(v_BKSH.dtype)
        out_BKGH = jnp.einsum("bkgs,bksh->bkgh", weights_BKGS, v_BKSH)
        return AttentionOutput(out_BKGH.reshape(B, 1, N, H), lse_BKG.reshape(B, 1, N))


def layer_of(stack: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, layer, axis=0, keepdims=False)


def write_row(stack: Array, layer: Array, row: Array, axis: int, index: Array) -> Array:
    """Return the stack with one row of one layer replaced, at `index` along `axis`."""
    starts = [layer] + [index if a == axis else jnp.zeros_like(index) for a in range(1, stack.ndim)]
    return lax.dynamic_update_slice(stack, row[None], starts)
