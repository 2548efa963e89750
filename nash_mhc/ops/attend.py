"""Causal attention over packed rows: one function, one meaning, several kernels.

`kernel="reference"` is the plain form, all scores at once; the tests hold every other kernel against it. `kernel="xla"` runs
anywhere: it walks blocks of queries, skips the keys that none of them may see, and computes the scores again in the backward
pass instead of keeping them (on a CPU, where memory is what is slow, two thirds of the plain step's time: docs/log.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PLAIN_KERNELS = ("reference", "xla")  # array code, which any partitioner can split; the others are opaque to it
KERNELS = (*PLAIN_KERNELS, "cudnn", "pallas", "splash")

_BLOCK = 64  # queries of one block of the xla kernel ...
_MOST_BLOCKS = 8  # ... and how many blocks it unrolls at most


def why_not(kernel: str, platform: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str | None:
    """What keeps a kernel from running there, in a few words; None if nothing does."""
    home = {"cudnn": "gpu", "pallas": "gpu", "splash": "tpu"}.get(kernel, platform)
    if platform != home:
        return f"runs on {home}, not on {platform}"
    if kernel == "cudnn" and dtype != "bfloat16":
        return f"takes bfloat16, not {dtype}"
    if kernel == "cudnn" and (head_dim % 8 or head_dim > 128 or seq_len % 2):
        return f"takes an even T and heads of 8, 16, ... 128, not T {seq_len} and heads of {head_dim}"
    if kernel == "pallas" and window is not None:
        return "has no window"
    if kernel in ("pallas", "splash") and seq_len % 128:
        return f"takes a T that is a multiple of 128, not {seq_len}"
    return None


def best_kernel(platform: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str:
    """The kernel that `auto` means: the platform's flash attention where it takes these shapes, plain XLA elsewhere."""
    wanted = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "xla")
    return "xla" if why_not(wanted, platform, dtype, seq_len, head_dim, window) else wanted


def fitting_kernel(kernel: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str:
    """`kernel` where it takes these shapes, plain XLA elsewhere: the coarse scales of a run may be too short for it."""
    home = {"cudnn": "gpu", "pallas": "gpu", "splash": "tpu"}.get(kernel, "cpu")
    return "xla" if why_not(kernel, home, dtype, seq_len, head_dim, window) else kernel


def attention_mask(T: int, segments_BT: Int[Array, "B T"] | None, window: int | None) -> Bool[Array, "#B 1 T T"]:
    """True where query t (rows) may look at key s (columns): s <= t, the same document, not farther than the window."""
    t, s = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    mask = s <= t
    if window is not None:
        mask = mask & (t - s < window)
    mask_BTT = mask[None]
    if segments_BT is not None:
        mask_BTT = mask_BTT & (segments_BT[:, :, None] == segments_BT[:, None, :])
    return mask_BTT[:, None]


class Documents(NamedTuple):
    """Where the documents of each row lie, for kernels that walk them one by one; those beyond the room are left out."""

    lengths_BM: Int[Array, "B M"]  # -1: no such document
    offsets_BM: Int[Array, "B M+1"]
    count_B: Int[Array, "B"] | None  # None: there is room for all, whatever the rows hold


class Rows(NamedTuple):
    """What attention needs of one resolution of a batch."""

    q_BTNH: Float[Array, "B T N H"]
    k_BTKH: Float[Array, "B T K H"]
    v_BTKH: Float[Array, "B T K H"]
    segments_BT: Int[Array, "B T"] | None = None
    documents: Documents | None = None  # of `segments_BT`, where they were found once for all layers


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
    kernel: str = "xla",
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v, causal, within a document, over the last `window` tokens. N is a multiple of K."""
    return attend_each((Rows(q_BTNH, k_BTKH, v_BTKH, segments_BT),), windows=(window,), kernels=(kernel,))[0]


def attend_each(
    each: tuple[Rows, ...], *, windows: tuple[int | None, ...], kernels: tuple[str, ...]
) -> tuple[Float[Array, "B _ N H"], ...]:
    """`attend` for several resolutions of the same documents."""
    forms = {"reference": _attend_reference, "xla": _attend_xla, "pallas": _attend_pallas, "splash": _attend_splash}
    unknown = [k for k in kernels if k not in KERNELS]
    if unknown:
        raise ValueError(f"unknown attention kernel {unknown[0]!r}; there are {', '.join(KERNELS)}")
    with_cudnn = [i for i, kernel in enumerate(kernels) if kernel == "cudnn"]
    # All of cuDNN's share one branch on the number of documents, at which the device waits for the host.
    done = dict(zip(with_cudnn, _attend_cudnn([each[i] for i in with_cudnn], [windows[i] for i in with_cudnn]), strict=True))
    return tuple(done[i] if i in done else forms[kernels[i]](*rows[:4], windows[i]) for i, rows in enumerate(each))


def _attend_reference(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
    logits_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32)
    logits_BKGTS = jnp.where(attention_mask(T, segments, window)[:, :, None], logits_BKGTS, -jnp.inf)
    # Every row sees at least itself, so the softmax never divides by zero.
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v).reshape(B, T, N, H)


def _query_blocks(T: int, window: int | None) -> list[tuple[int, int, int]]:
    """(first query, end of queries, first key) of each block; the keys end with the queries."""
    size = max(_BLOCK, -(-T // _MOST_BLOCKS))
    starts = range(0, T, size)
    return [(t, min(t + size, T), 0 if window is None else max(0, t - window + 1)) for t in starts]


def _block_scores(q: Array, k: Array, segments: Array | None, window: int | None, block: tuple[int, int, int]) -> Array:
    """Masked scores of one block of queries, [B, K, G, t, s], from [B, K, G, T, H] queries and [B, K, T, H] keys."""
    first, end, low = block
    scores = jnp.einsum("bkgth,bksh->bkgts", q[:, :, :, first:end], k[:, :, low:end], preferred_element_type=jnp.float32)
    t, s = jnp.arange(first, end)[:, None], jnp.arange(low, end)[None, :]
    mask = s <= t
    if window is not None:
        mask = mask & (t - s < window)
    mask = mask[None]
    if segments is not None:
        mask = mask & (segments[:, first:end, None] == segments[:, None, low:end])
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _blocks_forward(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> tuple[Array, Array]:
    out, lse = [], []
    for block in _query_blocks(q.shape[3], window):
        _, end, low = block
        scores = _block_scores(q, k, segments, window, block)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), v[:, :, low:end], preferred_element_type=jnp.float32)
        out.append((mixed / total).astype(v.dtype))
        lse.append(top + jnp.log(total))
    return jnp.concatenate(out, axis=3), jnp.concatenate(lse, axis=3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocks(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    return _blocks_forward(q, k, v, segments, window)[0]


def _blocks_fwd(q, k, v, segments, window):  # type: ignore[no-untyped-def]
    out, lse = _blocks_forward(q, k, v, segments, window)
    return out, (q, k, v, segments, out, lse)


def _blocks_bwd(window, saved, dout):  # type: ignore[no-untyped-def]
    q, k, v, segments, out, lse = saved
    dtype = q.dtype
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for block in _query_blocks(q.shape[3], window):
        first, end, low = block
        rows, keys = (slice(None),) * 3 + (slice(first, end),), (slice(None),) * 2 + (slice(low, end),)
        weights = jnp.exp(_block_scores(q, k, segments, window, block) - lse[rows])
        dweights = jnp.einsum("bkgth,bksh->bkgts", dout[rows], v[keys], preferred_element_type=jnp.float32)
        dscores = (weights * (dweights - delta[rows])).astype(dtype)
        dv = dv.at[keys].add(jnp.einsum("bkgts,bkgth->bksh", weights.astype(dtype), dout[rows]))
        dk = dk.at[keys].add(jnp.einsum("bkgts,bkgth->bksh", dscores, q[rows]))
        dq.append(jnp.einsum("bkgts,bksh->bkgth", dscores, k[keys]))
    return jnp.concatenate(dq, axis=3), dk.astype(dtype), dv.astype(dtype), None


_blocks.defvjp(_blocks_fwd, _blocks_bwd)


def _attend_xla(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BKGTH = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    out_BKGTH = _blocks(q_BKGTH, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments, window)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


# Room for documents in a row when cuDNN walks them one by one. It pays for the room, not for the documents, so where their
# number is not known ahead there are two sizes; rows of more documents take a mask. Figures in docs/log.md.
_CUDNN_ROOMS = (4, 32)


def _attend_cudnn(each: Sequence[Rows], windows: Sequence[int | None]) -> Sequence[Array]:
    if not each or each[0].segments_BT is None:
        return [_cudnn_masked(rows, window) for rows, window in zip(each, windows, strict=True)]
    # Checkpointed: a branch's memory for the backward pass is set aside whether it is taken or not, and this one's has T x T.
    with_mask = jax.checkpoint(lambda: [_cudnn_masked(rows, window) for rows, window in zip(each, windows, strict=True)])
    fused = _packed_cudnn()
    if fused is None:
        return with_mask()
    documents = [rows.documents or documents_of(rows.segments_BT) for rows in each]  # type: ignore[arg-type]

    def by_document(room: int) -> list[Array]:
        return [_by_document(fused, *each[i][:3], documents[i], windows[i], room) for i in range(len(each))]

    if (count_B := documents[0].count_B) is None:
        return by_document(documents[0].lengths_BM.shape[1])
    # A branch on the device's own numbers, for which the host waits in every layer: it cannot run ahead any more.
    smallest = jnp.sum(jnp.max(count_B) > jnp.array(_CUDNN_ROOMS))
    return jax.lax.switch(smallest, [*(functools.partial(by_document, room) for room in _CUDNN_ROOMS), with_mask])


def _cudnn_masked(rows: Rows, window: int | None) -> Array:
    q, k, v, segments, _ = rows
    # The causal part stays with the kernel, which skips what lies above the diagonal; only documents need a mask.
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    span = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, local_window_size=span, implementation="cudnn")


def documents_of(segments_BT: Int[Array, "B T"], most: int | None = None) -> Documents:
    """`most`: what the rows are known to hold at most."""
    known = most is not None and most <= _CUDNN_ROOMS[-1]
    room = 1 << (most - 1).bit_length() if most is not None and known else _CUDNN_ROOMS[-1]
    starts = jnp.concatenate([jnp.ones_like(segments_BT[:, :1], bool), segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)
    number_BT = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
    length_BM = jax.vmap(lambda row: jnp.zeros(room, jnp.int32).at[row].add(1, mode="drop"))(number_BT)
    offset_BM = jnp.cumsum(length_BM, axis=1) - length_BM
    there_BM = length_BM > 0
    return Documents(
        lengths_BM=jnp.where(there_BM, length_BM, -1),
        offsets_BM=jnp.pad(jnp.where(there_BM, offset_BM, -1), ((0, 0), (0, 1)), constant_values=-1),
        count_B=None if known else number_BT[:, -1] + 1,
    )


def _packed_cudnn():  # type: ignore[no-untyped-def]
    """cuDNN's attention over documents given by offset and length, which JAX has but does not export; None where it is not."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused

        capability = float(jax.local_devices(backend="gpu")[0].compute_capability)
    except (ImportError, RuntimeError, AttributeError, ValueError):
        return None
    return fused if capability >= 9.0 else None


def _by_document(fused, q: Array, k: Array, v: Array, documents: Documents, window: int | None, room: int) -> Array:  # type: ignore[no-untyped-def]
    lengths, offsets = documents.lengths_BM[:, :room], documents.offsets_BM[:, : room + 1]
    return fused.dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.PADDING_CAUSAL, sliding_window_length=window,
    )  # fmt: skip


def _attend_pallas(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

    if window is not None:
        raise ValueError("the pallas GPU kernel has no window; use cudnn or xla")
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return gpu_attention.mha(q, k, v, segment_ids=segments, sm_scale=q.shape[-1] ** -0.5, causal=True)


def _splash_kernel(group: int, T: int, window: int | None):  # type: ignore[no-untyped-def]
    """Made anew in each trace: the kernel holds mask tables, arrays that must not leak from one trace into the next."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    one = splash.CausalMask((T, T)) if window is None else splash.LocalMask((T, T), (window - 1, 0), 0)
    block = next(size for size in (512, 384, 256, 128) if T % size == 0)  # `why_not` sees to it that one does
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return splash.make_splash_mqa_single_device(mask=splash.MultiHeadMask([one] * group), block_sizes=sizes)


def _attend_splash(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, N, H = q.shape
    K = k.shape[2]
    # The kernel wants whole lanes of 128; zero columns change neither the scores nor the values that are kept.
    pad = -H % 128
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad))) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v))
    q_BKGTH = q.reshape(B, T, K, N // K, H + pad).transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    kernel = _splash_kernel(N // K, T, window)
    ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
    over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out_BKGTH = jax.vmap(over_heads)(q_BKGTH, k_BKTH, v_BKTH, ids)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H + pad)[..., :H]
