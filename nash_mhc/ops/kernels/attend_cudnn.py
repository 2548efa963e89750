"""cuDNN's attention over packed sequences, one document at a time, with and without its log-sum-exp.

This binds JAX's primitives directly. The public function of JAX 0.10 scales the offsets of keys by the number of query
heads, which is wrong for grouped queries (fixed in 0.11.2), and its backward pass takes no gradient of the lse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.attention_io import ATTENDED, AttentionInput, AttentionOutput, Documents, bounds_of, with_lse_gradient
from nash_mhc.ops.platform import sums_in_any_order
from nash_mhc.runtime.compat import cudnn

# Capacities for documents per sequence. cuDNN's cost follows the capacity, not the documents, so there are two sizes if
# their number is unknown; sequences with more documents use the mask. Only unusual head sizes need this.
_CAPACITIES = (4, 32)
_KEYS_AT_ONCE = 4096  # keys of one part of the backward pass


def documents_of(segments_BT: Int[Array, "B T"], most: int | None = None) -> Documents:
    """Return where the documents of each sequence are. A sequence has at most `most` documents (None: unknown)."""
    known = most is not None and most <= _CAPACITIES[-1]
    capacity = 1 << (most - 1).bit_length() if most is not None and known else _CAPACITIES[-1]
    begins = jnp.concatenate([jnp.ones_like(segments_BT[:, :1], bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    number_BT = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    length_BM = jax.vmap(lambda row: jnp.zeros(capacity, jnp.int32).at[row].add(1, mode="drop"))(number_BT)
    return Documents(
        lengths_BM=length_BM,
        starts_BM=jnp.cumsum(length_BM, axis=1) - length_BM,
        number_BT=number_BT,
        count_B=None if known else number_BT[:, -1] + 1,
        bounds=bounds_of(segments_BT),
    )


class _DocumentList(NamedTuple):
    """All documents of a batch in one list, as cuDNN expects them: absent ones last, starts counted over the batch."""

    q_lengths_BM: Int[Array, "B M"]
    k_lengths_BM: Int[Array, "B M"]
    q_starts_BM: Int[Array, "B M+1"]
    k_starts_BM: Int[Array, "B M+1"]
    order_M: Int[Array, "X"]  # index of each entry in the flattened per-sequence lists


class _Part(NamedTuple):
    """A range of keys, and the queries that may see one of them."""

    first: int
    k_end: int
    q_end: int


def _list_documents(documents: Documents, part: _Part) -> _DocumentList:
    """List the documents that have keys in this part. Queries begin with the first of these keys."""
    lengths_BM, starts_BM = documents.lengths_BM, documents.starts_BM
    B, M = lengths_BM.shape
    ends_BM, begins_BM = starts_BM + lengths_BM, jnp.maximum(starts_BM, part.first)
    present_BM = (lengths_BM > 0) & (begins_BM < jnp.minimum(ends_BM, part.k_end))
    order = jnp.argsort(~present_BM.reshape(-1), stable=True)

    def listed(end: int) -> tuple[Array, Array]:
        width = end - part.first
        offsets_B1 = width * jnp.arange(B, dtype=jnp.int32)[:, None]
        lengths = jnp.where(present_BM, jnp.minimum(ends_BM, end) - begins_BM, 0).reshape(-1)[order]
        starts = jnp.where(present_BM, begins_BM - part.first + offsets_B1, B * width).reshape(-1)[order]
        return lengths.reshape(B, M), jnp.pad(starts, (0, B), constant_values=B * width).reshape(B, M + 1)

    (q_lengths, q_starts), (k_lengths, k_starts) = listed(part.q_end), listed(part.k_end)
    return _DocumentList(q_lengths, k_lengths, q_starts, k_starts, order)


def _with_capacity(documents: Documents, capacity: int) -> Documents:
    lengths_BM, starts_BM = documents.lengths_BM[:, :capacity], documents.starts_BM[:, :capacity]
    return documents._replace(lengths_BM=lengths_BM, starts_BM=starts_BM)


class _Form(NamedTuple):
    window: int | None
    with_lse: bool  # whether to return the log-sum-exp, whose gradient costs one more pass over the output


def _operands(
    q: Array, k: Array, v: Array, listed: _DocumentList | None, form: _Form
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Return (the leading operands of every call, the parameters of every call)."""
    fused, none = cudnn.fused(), jnp.zeros(0, q.dtype)
    lists = (none,) * 4
    if listed is not None:
        q_offsets, k_offsets = listed.q_starts_BM * (q.shape[2] * q.shape[3]), listed.k_starts_BM * (k.shape[2] * k.shape[3])
        lists = (listed.q_lengths_BM, listed.k_lengths_BM, q_offsets, k_offsets)
    settings = {
        "scale": q.shape[-1] ** -0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": fused.MaskType.CAUSAL if listed is None else fused.MaskType.PADDING_CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value, "sliding_window_length": form.window,
    }  # fmt: skip
    return (q, k, v, none, *lists, none, none), settings


def _by_token(sums: Float[Array, "X N T"], documents: Documents | None, listed: _DocumentList | None) -> Float[Array, "B T N"]:
    """Reorder cuDNN's log-sum-exp, which has a row for each listed document, by token."""
    if documents is None or listed is None:
        return sums.transpose(0, 2, 1)
    B, M = documents.lengths_BM.shape
    index_BM = jnp.zeros(B * M, jnp.int32).at[listed.order_M].set(jnp.arange(B * M, dtype=jnp.int32)).reshape(B, M)
    number_BT = jnp.minimum(documents.number_BT, M - 1)
    row_BT = jnp.take_along_axis(index_BM, number_BT, axis=1)
    T = documents.number_BT.shape[1]
    position_BT = jnp.arange(T, dtype=jnp.int32)[None] - jnp.take_along_axis(documents.starts_BM, number_BT, axis=1)
    return jax.vmap(lambda sums_XT: sums_XT.at[row_BT, position_BT].get(mode="clip"), 1, 2)(sums)


def _by_document(sums_BTN: Float[Array, "B T N"], listed: _DocumentList | None) -> Float[Array, "X N T"]:
    """Invert `_by_token`; `sums_BTN` has only the queries of `listed`."""
    if listed is None:
        return sums_BTN.transpose(0, 2, 1)
    B, T, N = sums_BTN.shape
    index_XT = listed.q_starts_BM.reshape(-1)[: listed.q_lengths_BM.size, None] + jnp.arange(T, dtype=jnp.int32)[None]
    return sums_BTN.reshape(B * T, N).at[index_XT].get(mode="clip").transpose(0, 2, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Form, q: Array, k: Array, v: Array, documents: Documents | None) -> tuple[Array, Array | None]:
    return _attend_fwd(form, q, k, v, documents)[0]


def _attend_fwd(form, q, k, v, documents):  # type: ignore[no-untyped-def]
    T = q.shape[1]
    listed = None if documents is None else _list_documents(documents, _Part(0, T, T))
    operands, settings = _operands(q, k, v, listed, form)
    out, sums = cudnn.forward(*operands, is_training=True, **settings)
    out, sums_BTN = checkpoint_name(out, ATTENDED), checkpoint_name(_by_token(sums, documents, listed), ATTENDED)
    return (out, sums_BTN if form.with_lse else None), (q, k, v, documents, out, sums_BTN)


def _attend_bwd(form, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, documents, out, sums_BTN = saved
    dout, dlse_BTN = cotangents
    if form.with_lse:
        out = with_lse_gradient(out, dout, dlse_BTN).astype(out.dtype)
    parts = [_Part(0, q.shape[1], q.shape[1])] if sums_in_any_order() else _parts(q.shape[1], form.window)
    if documents is None and form.window is not None and len(parts) > 1:
        # A part has more queries than keys. With a window, cuDNN accepts that for documents only: one per sequence.
        documents = documents_of(jnp.zeros(q.shape[:2], jnp.int32), most=1)
    dq, dks, dvs = jnp.zeros(q.shape, jnp.float32) if len(parts) > 1 else None, [], []
    for part in parts:
        listed = None if documents is None else _list_documents(documents, part)
        queries, keys = slice(part.first, part.q_end), slice(part.first, part.k_end)
        operands, settings = _operands(q[:, queries], k[:, keys], v[:, keys], listed, form)
        state = _by_document(sums_BTN[:, queries], listed), out[:, queries], dout[:, queries]
        dq_part, dk, dv = cudnn.backward(*operands, *state, **settings)
        if dq is None:
            return dq_part, dk, dv, None
        if documents is not None:  # cuDNN leaves queries that see none of these keys uninitialized
            dq_part = jnp.where(_sees_part(documents, part)[..., None, None], dq_part, 0)
        dq = dq.at[:, queries].add(dq_part.astype(jnp.float32))
        dks.append(dk)
        dvs.append(dv)
    return dq.astype(q.dtype), jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1), None  # type: ignore[union-attr]


def _parts(T: int, window: int | None) -> list[_Part]:
    """Split the keys of long sequences: cuDNN's deterministic backward pass holds a copy of dQ for every 128 keys."""
    ends = [min(first + _KEYS_AT_ONCE, T) for first in range(0, T, _KEYS_AT_ONCE)]
    return [
        _Part(first, end, T if window is None else min(T, end + window - 1 + (end + window - 1) % 2))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _sees_part(documents: Documents, part: _Part) -> Bool[Array, "B T"]:
    """Return which queries of a part belong to a document with keys in it."""
    number_BT = jnp.minimum(documents.number_BT[:, part.first : part.q_end], documents.lengths_BM.shape[1] - 1)
    return jnp.take_along_axis(documents.starts_BM, number_BT, axis=1) < part.k_end


_attend.defvjp(_attend_fwd, _attend_bwd)


Fallback = Callable[[AttentionInput, int | None], Any]


def _attend_all(
    inputs: Sequence[AttentionInput], windows: Sequence[int | None], with_lse: bool, fallback: Fallback
) -> Sequence[Any]:
    """Attend at several resolutions. `fallback` serves sequences with more documents than the largest capacity."""
    if not inputs:
        return []
    forms = [_Form(window, with_lse) for window in windows]
    output = lambda pair: AttentionOutput(*pair) if with_lse else pair[0]
    # Checkpointed because XLA reserves the residuals of every branch, taken or not, and these would be T x T.
    run_fallback = jax.checkpoint(lambda: [fallback(x, window) for x, window in zip(inputs, windows, strict=True)])
    if not cudnn.is_available():
        return run_fallback()
    if inputs[0].segments_BI is None:
        return [output(_attend(form, *x[:3], None)) for x, form in zip(inputs, forms, strict=True)]
    if not cudnn.supports_document_masks():
        return run_fallback()
    documents = [x.documents or documents_of(x.segments_BI) for x in inputs]  # type: ignore[arg-type]

    def by_document(capacity: int) -> list[Any]:
        return [output(_attend(forms[i], *inputs[i][:3], _with_capacity(documents[i], capacity))) for i in range(len(inputs))]

    if (count_B := documents[0].count_B) is None:
        return by_document(documents[0].lengths_BM.shape[1])
    # A branch on device values: the host waits for them in every layer and cannot run ahead.
    smallest = jnp.sum(jnp.max(count_B) > jnp.array(_CAPACITIES))
    return jax.lax.switch(smallest, [*(functools.partial(by_document, capacity) for capacity in _CAPACITIES), run_fallback])


def attend_cudnn(inputs: AttentionInput, window: int | None) -> Float[Array, "B T N H"]:
    (out_BTNH,) = _attend_all([inputs], [window], False, _masked)
    return out_BTNH


def attend_cudnn_with_lse(
    inputs: Sequence[AttentionInput], windows: Sequence[int | None], fallback: Fallback
) -> Sequence[AttentionOutput]:
    """Attend at several resolutions, which share one branch on the number of documents."""
    return _attend_all(inputs, windows, True, fallback)


def _masked(inputs: AttentionInput, window: int | None) -> Array:
    q, k, v, segments, _ = inputs
    # The kernel handles causality and skips blocks above the diagonal. Only documents need a mask.
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    span = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, local_window_size=span, implementation="cudnn")
