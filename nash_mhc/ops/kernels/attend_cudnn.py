"""cuDNN's attention over packed rows, which walks the documents one by one, with and without its evidence.

JAX's own primitives are called with operands made here. JAX 0.10 makes offsets of the keys that are wrong for grouped
queries (scaled by the number of the queries' heads, so that other tokens' keys are read; 0.11.2 has it right), and its
backward pass takes no gradient of the evidence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.attend_rows import FOUND, Documents, Found, Rows, bounds_of, with_gradient_of_evidence
from nash_mhc.ops.platform import sums_in_any_order
from nash_mhc.runtime.compat import cudnn

# Capacity for documents per sequence. cuDNN's cost follows the capacity, not the documents, so there are two sizes if
# their number is unknown; sequences with more documents use the mask. Only unusual head sizes need this.
_ROOMS = (4, 32)
_KEYS_AT_ONCE = 4096  # of the backward pass


def documents_of(segments_BT: Int[Array, "B T"], most: int | None = None) -> Documents:
    """`most`: what the rows are known to hold at most."""
    known = most is not None and most <= _ROOMS[-1]
    room = 1 << (most - 1).bit_length() if most is not None and known else _ROOMS[-1]
    begins = jnp.concatenate([jnp.ones_like(segments_BT[:, :1], bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    number_BT = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    length_BM = jax.vmap(lambda row: jnp.zeros(room, jnp.int32).at[row].add(1, mode="drop"))(number_BT)
    return Documents(
        lengths_BM=length_BM,
        starts_BM=jnp.cumsum(length_BM, axis=1) - length_BM,
        number_BT=number_BT,
        count_B=None if known else number_BT[:, -1] + 1,
        bounds=bounds_of(segments_BT),
    )


class _Walk(NamedTuple):
    """All documents of a batch in one list, as cuDNN wants them, the missing ones last.
    Starts are counted through the rows."""

    q_lengths_BM: Int[Array, "B M"]
    k_lengths_BM: Int[Array, "B M"]
    q_starts_BM: Int[Array, "B M+1"]
    k_starts_BM: Int[Array, "B M+1"]
    order_M: Int[Array, "X"]  # of the list: which place of the rows' own lists each one has


class _Part(NamedTuple):
    """A part of the keys, and the queries that may see one of them."""

    first: int
    k_end: int
    q_end: int


def _walk(documents: Documents, part: _Part) -> _Walk:
    """Through the documents as far as they have keys in that part; queries begin with the first of these keys."""
    lengths_BM, starts_BM = documents.lengths_BM, documents.starts_BM
    B, M = lengths_BM.shape
    ends_BM, begins_BM = starts_BM + lengths_BM, jnp.maximum(starts_BM, part.first)
    there_BM = (lengths_BM > 0) & (begins_BM < jnp.minimum(ends_BM, part.k_end))
    order = jnp.argsort(~there_BM.reshape(-1), stable=True)

    def listed(end: int) -> tuple[Array, Array]:
        width = end - part.first
        rows_B1 = width * jnp.arange(B, dtype=jnp.int32)[:, None]
        lengths = jnp.where(there_BM, jnp.minimum(ends_BM, end) - begins_BM, 0).reshape(-1)[order]
        starts = jnp.where(there_BM, begins_BM - part.first + rows_B1, B * width).reshape(-1)[order]
        return lengths.reshape(B, M), jnp.pad(starts, (0, B), constant_values=B * width).reshape(B, M + 1)

    (q_lengths, q_starts), (k_lengths, k_starts) = listed(part.q_end), listed(part.k_end)
    return _Walk(q_lengths, k_lengths, q_starts, k_starts, order)


def _in_room(documents: Documents, room: int) -> Documents:
    return documents._replace(lengths_BM=documents.lengths_BM[:, :room], starts_BM=documents.starts_BM[:, :room])


class _Form(NamedTuple):
    window: int | None
    evident: bool  # whether the evidence is asked for: its gradient is one more pass over what was found


def _operands(q: Array, k: Array, v: Array, walk: _Walk | None, form: _Form) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """(what comes first in every call, the settings of all)."""
    fused, none = cudnn.fused(), jnp.zeros(0, q.dtype)
    lists = (none,) * 4
    if walk is not None:
        of_queries, of_keys = walk.q_starts_BM * (q.shape[2] * q.shape[3]), walk.k_starts_BM * (k.shape[2] * k.shape[3])
        lists = (walk.q_lengths_BM, walk.k_lengths_BM, of_queries, of_keys)
    settings = {
        "scale": q.shape[-1] ** -0.5, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": fused.MaskType.CAUSAL if walk is None else fused.MaskType.PADDING_CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value, "sliding_window_length": form.window,
    }  # fmt: skip
    return (q, k, v, none, *lists, none, none), settings


def _by_token(sums: Float[Array, "X N T"], documents: Documents | None, walk: _Walk | None) -> Float[Array, "B T N"]:
    """cuDNN has a row for each document of the list."""
    if documents is None or walk is None:
        return sums.transpose(0, 2, 1)
    B, M = documents.lengths_BM.shape
    place_BM = jnp.zeros(B * M, jnp.int32).at[walk.order_M].set(jnp.arange(B * M, dtype=jnp.int32)).reshape(B, M)
    number_BT = jnp.minimum(documents.number_BT, M - 1)
    row_BT = jnp.take_along_axis(place_BM, number_BT, axis=1)
    T = documents.number_BT.shape[1]
    position_BT = jnp.arange(T, dtype=jnp.int32)[None] - jnp.take_along_axis(documents.starts_BM, number_BT, axis=1)
    return jax.vmap(lambda sums_XT: sums_XT.at[row_BT, position_BT].get(mode="clip"), 1, 2)(sums)


def _by_list(sums_BTN: Float[Array, "B T N"], walk: _Walk | None) -> Float[Array, "X N T"]:
    """The other way, for the queries of a part."""
    if walk is None:
        return sums_BTN.transpose(0, 2, 1)
    B, T, N = sums_BTN.shape
    places_XT = walk.q_starts_BM.reshape(-1)[: walk.q_lengths_BM.size, None] + jnp.arange(T, dtype=jnp.int32)[None]
    return sums_BTN.reshape(B * T, N).at[places_XT].get(mode="clip").transpose(0, 2, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Form, q: Array, k: Array, v: Array, documents: Documents | None) -> tuple[Array, Array | None]:
    return _attend_fwd(form, q, k, v, documents)[0]


def _attend_fwd(form, q, k, v, documents):  # type: ignore[no-untyped-def]
    T = q.shape[1]
    walk = None if documents is None else _walk(documents, _Part(0, T, T))
    operands, settings = _operands(q, k, v, walk, form)
    out, sums = cudnn.forward(*operands, is_training=True, **settings)
    out, sums_BTN = checkpoint_name(out, FOUND), checkpoint_name(_by_token(sums, documents, walk), FOUND)
    return (out, sums_BTN if form.evident else None), (q, k, v, documents, out, sums_BTN)


def _attend_bwd(form, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, documents, out, sums_BTN = saved
    dout, devidence_BTN = cotangents
    if form.evident:
        out = with_gradient_of_evidence(out, dout, devidence_BTN).astype(out.dtype)
    parts = [_Part(0, q.shape[1], q.shape[1])] if sums_in_any_order() else _parts(q.shape[1], form.window)
    if documents is None and form.window is not None and len(parts) > 1:
        # A part has more queries than keys, and with a window cuDNN takes that of documents only: each row is one.
        documents = documents_of(jnp.zeros(q.shape[:2], jnp.int32), most=1)
    dq, dks, dvs = jnp.zeros(q.shape, jnp.float32) if len(parts) > 1 else None, [], []
    for part in parts:
        walk = None if documents is None else _walk(documents, part)
        queries, keys = slice(part.first, part.q_end), slice(part.first, part.k_end)
        operands, settings = _operands(q[:, queries], k[:, keys], v[:, keys], walk, form)
        state = _by_list(sums_BTN[:, queries], walk), out[:, queries], dout[:, queries]
        one, dk, dv = cudnn.backward(*operands, *state, **settings)
        if dq is None:
            return one, dk, dv, None
        if documents is not None:  # whoever sees none of these keys was not asked, and has what lay there before
            one = jnp.where(_asked(documents, part)[..., None, None], one, 0)
        dq = dq.at[:, queries].add(one.astype(jnp.float32))
        dks.append(dk)
        dvs.append(dv)
    return dq.astype(q.dtype), jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1), None  # type: ignore[union-attr]


def _parts(T: int, window: int | None) -> list[_Part]:
    """The same bits in every run cost cuDNN a copy of dQ for every 128 keys:
    of long rows, it gets the keys part by part."""
    ends = [min(first + _KEYS_AT_ONCE, T) for first in range(0, T, _KEYS_AT_ONCE)]
    return [
        _Part(first, end, T if window is None else min(T, end + window - 1 + (end + window - 1) % 2))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _asked(documents: Documents, part: _Part) -> Bool[Array, "B T"]:
    """Which queries of a part are of a document that has keys in it."""
    number_BT = jnp.minimum(documents.number_BT[:, part.first : part.q_end], documents.lengths_BM.shape[1] - 1)
    return jnp.take_along_axis(documents.starts_BM, number_BT, axis=1) < part.k_end


_attend.defvjp(_attend_fwd, _attend_bwd)


Otherwise = Callable[[Rows, int | None], Any]


def _each(each: Sequence[Rows], windows: Sequence[int | None], evident: bool, otherwise: Otherwise) -> Sequence[Any]:
    """`otherwise`: for rows of more documents than there is room for."""
    if not each:
        return []
    forms = [_Form(window, evident) for window in windows]
    found = lambda pair: Found(*pair) if evident else pair[0]
    # Checkpointed: a branch's memory for the backward pass is set aside whether it is taken or not,
    # and this one's has T x T.
    another_way = jax.checkpoint(lambda: [otherwise(rows, window) for rows, window in zip(each, windows, strict=True)])
    if not cudnn.is_known():
        return another_way()
    if each[0].segments_BI is None:
        return [found(_attend(form, *rows[:3], None)) for rows, form in zip(each, forms, strict=True)]
    if not cudnn.walks_documents():
        return another_way()
    documents = [rows.documents or documents_of(rows.segments_BI) for rows in each]  # type: ignore[arg-type]

    def by_document(room: int) -> list[Any]:
        return [found(_attend(forms[i], *each[i][:3], _in_room(documents[i], room))) for i in range(len(each))]

    if (count_B := documents[0].count_B) is None:
        return by_document(documents[0].lengths_BM.shape[1])
    # A branch on the device's own numbers, for which the host waits in every layer: it cannot run ahead any more.
    smallest = jnp.sum(jnp.max(count_B) > jnp.array(_ROOMS))
    return jax.lax.switch(smallest, [*(functools.partial(by_document, room) for room in _ROOMS), another_way])


def attend_cudnn(rows: Rows, window: int | None) -> Float[Array, "B T N H"]:
    (out_BTNH,) = _each([rows], [window], False, _masked)
    return out_BTNH


def found_by_cudnn(each: Sequence[Rows], windows: Sequence[int | None], otherwise: Otherwise) -> Sequence[Found]:
    """All resolutions share one branch on the number of documents, at which the device waits for the host."""
    return _each(each, windows, True, otherwise)


def _masked(rows: Rows, window: int | None) -> Array:
    q, k, v, segments, _ = rows
    # The causal part stays with the kernel, which skips what lies above the diagonal; only documents need a mask.
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    span = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, local_window_size=span, implementation="cudnn")
