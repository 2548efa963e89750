"""Inspect a model on one text: weights of the scales, attention of the heads, mixing of the streams.

Everything comes from captures of the model's forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nash_mhc.config.schema import ConfigError
from nash_mhc.model.lm import LM
from nash_mhc.model.protocol import Execution
from nash_mhc.ops.attend import attend_with_lse
from nash_mhc.ops.attention_io import AttentionInput


class Gaze(NamedTuple):
    """The attention weights of one head at one scale."""

    stride: int  # tokens per block
    weights_TS: np.ndarray  # of token t on block s
    nothing_T: np.ndarray  # on the null key; with it, the weights of a token sum to 1


@dataclasses.dataclass(frozen=True)
class Inside:
    """Intermediates of one text: L layers, C scales (finest first), T tokens, N heads, R streams. On the host."""

    hidden_TD: np.ndarray  # final hidden states
    weights_LCTN: np.ndarray  # weights of the scales after the game
    found_LCTNH: np.ndarray  # attention output of each scale
    attention_LTD: np.ndarray  # output of the mixer
    mixing_LSTRR: np.ndarray | None  # H_res of each residual (S) of a layer; None: plain residual
    rows: tuple[AttentionInput, ...]  # per scale: queries, keys and values of all layers
    strides: tuple[int, ...]
    windows: tuple[int | None, ...]  # per layer

    @property
    def entropy_LTN(self) -> np.ndarray:
        """Entropy of the scales' weights over its maximum: 0 if one scale has all the weight, 1 if all are equal."""
        w = self.weights_LCTN
        return -np.sum(w * np.log(np.maximum(w, 1e-30)), axis=1) / math.log(w.shape[1])

    @property
    def composite_LTRR(self) -> np.ndarray:
        """Product of all H_res up to the end of each layer: how much of the first streams remains."""
        if self.mixing_LSTRR is None:
            raise ConfigError(
                "this model has no residual streams to inspect; use a model with --model-residual mhc or mhc-layer"
            )
        products = [np.eye(self.mixing_LSTRR.shape[-1])[None]]
        for mixing_STRR in self.mixing_LSTRR:
            products.append(functools.reduce(lambda product, next_TRR: next_TRR @ product, mixing_STRR, products[-1]))
        return np.stack(products[1:])

    def gaze(self, layer: int, head: int) -> tuple[Gaze, ...]:
        """Return the attention weights of a head at each scale."""
        L, _, T, N = self.weights_LCTN.shape
        if not (0 <= layer < L and 0 <= head < N):
            raise ConfigError(f"layer {layer}, head {head}: this model has layers 0 to {L - 1} and heads 0 to {N - 1}")
        gazes = []
        for c, (rows, stride) in enumerate(zip(self.rows, self.strides, strict=True)):
            of_layer = jax.tree.map(lambda a: jnp.asarray(a[layer]), rows)
            weights_TNS = np.asarray(_attention_weights(of_layer, None if c else self.windows[layer]))
            weights_TS = weights_TNS[:T, head]
            # The keys of a coarse scale are shifted by one row: the first is the null key.
            gazes.append(Gaze(stride, weights_TS[:, 1:] if c else weights_TS, weights_TS[:, 0] if c else np.zeros(T)))
        return tuple(gazes)


@functools.partial(jax.jit, static_argnums=1)
def _attention_weights(rows: AttentionInput, window: int | None) -> Float[Array, "T N S"]:
    """Return the weights of the model's own attention, as its outputs for one-hot values, H keys at a time."""
    S, K, H = rows.k_BIKH.shape[1:]
    chunks = -(-S // H)
    one_hot_PSH = jnp.eye(S, chunks * H).reshape(S, chunks, H).swapaxes(0, 1)
    attend = functools.partial(attend_with_lse, windows=(window,), kernels=("xla",))

    def chunk(one_hot_SH: Array) -> Array:
        value_BSKH = jnp.broadcast_to(one_hot_SH[None, :, None], (1, S, K, H))
        (output,) = attend((rows._replace(v_BIKH=value_BSKH),))
        return output.out_BTNH[0]

    weights_PTNH = jax.lax.map(chunk, one_hot_PSH)
    T, N = weights_PTNH.shape[1:3]
    return weights_PTNH.transpose(1, 2, 0, 3).reshape(T, N, chunks * H)[..., :S]


def _matrices(rows: Any) -> np.ndarray:
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


_CAPTURES = ("scale_inputs", "scale_outputs", "scale_weights", "mixer_output", "stream_maps")


@functools.partial(jax.jit, static_argnums=2)
def _forward(model: LM, tokens_BT: Int[Array, "B T"], dtype: str) -> tuple[Array, dict[str, Any]]:
    return model.hidden(tokens_BT, execution=Execution(dtype=dtype, attention="xla", captures=_CAPTURES))


def look(model: Any, tokens: Sequence[int] | np.ndarray, *, dtype: str = "float32") -> Inside:
    """Run one text, as one document, and return its captures. Raise ConfigError for a model without scales."""
    tokens_T = np.asarray(tokens, np.int32)
    if not isinstance(model, LM) or model.cfg.scales == 1:
        raise ConfigError("this model has no coarse scales to inspect; use a model with --model-scales above 1")
    if tokens_T.ndim != 1 or not tokens_T.size or tokens_T.min() < 0 or tokens_T.max() >= model.cfg.vocab_size:
        raise ConfigError(f"the text needs at least one token, and token ids from 0 to {model.cfg.vocab_size - 1}")
    T, cfg = tokens_T.size, model.cfg
    hidden_BTD, captured = jax.device_get(_forward(model, jnp.asarray(tokens_T)[None], dtype))
    # The batch is one sequence, padded to whole blocks.
    cut = lambda x_LBT: np.asarray(x_LBT[:, 0, :T], np.float32)
    mixing = [cut(_matrices(rows)) for rows in captured.get("stream_maps", ())]
    return Inside(
        hidden_TD=np.asarray(hidden_BTD[0], np.float32),
        weights_LCTN=np.stack([cut(w) for w in captured["scale_weights"]], axis=1),
        found_LCTNH=np.stack([cut(x) for x in captured["scale_outputs"]], axis=1),
        attention_LTD=cut(captured["mixer_output"]),
        mixing_LSTRR=np.stack(mixing, axis=1) if mixing else None,
        rows=captured["scale_inputs"],
        strides=cfg.strides,
        windows=tuple(kind.window for kind in cfg.group) * (cfg.layers // len(cfg.group)),
    )
