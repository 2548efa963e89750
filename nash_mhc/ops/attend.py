"""Causal attention over packed rows: one function, one meaning, several kernels.

`kernel="reference"` is the plain form, all scores at once; the tests hold every other kernel against it. `kernel="xla"`
runs anywhere: it walks blocks of queries, skips the keys that none of them may see, and computes the scores again in
the backward pass instead of keeping them (on a CPU, where memory is what is slow, two thirds of the plain step's time:
docs/experiments.md).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.attend_rows import FOUND, Documents, Found, Rows, by_block, by_token
from nash_mhc.ops.kernels.attend_cudnn import attend_cudnn, found_by_cudnn
from nash_mhc.ops.kernels.attend_splash import attend_splash, found_by_splash, gives_evidence
from nash_mhc.ops.kernels.attend_triton import fits_triton, found_by_triton
from nash_mhc.runtime.compat import cudnn

PLAIN_KERNELS = ("reference", "xla")  # array code, which any partitioner can split; the others are opaque to it
EVIDENT_KERNELS = (*PLAIN_KERNELS, "cudnn", "splash")  # that tell the log of the softmax's sum
KERNELS = (*EVIDENT_KERNELS, "pallas")
SHAPES_ONLY = "shapes"  # computes nothing: what a flash kernel reads, writes and saves, for traces of memory

_BLOCK = 64  # queries of one block of the xla kernel ...
_MOST_BLOCKS = 8  # ... and how many blocks it unrolls at most
_NARROW = 1024  # keys that a query sees: with more of them, cuDNN is faster than kernels of our own (docs/experiments.md)


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


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"] | None = None,
    documents: Documents | None = None,
    *,
    window: int | None = None,
    kernel: str = "xla",
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v, causal, within a document, over the last `window` tokens. N is a multiple of K."""
    if kernel == "cudnn":
        rows = Rows(q_BTNH, k_BTKH, v_BTKH, segments_BT, documents)
        ours = _are_unknown(rows) and fits_triton(rows)
        return found_by_triton(rows, window).out_BTNH if ours else attend_cudnn(rows, window)
    plain = {"reference": _found_by_reference, "xla": _found_by_blocks, SHAPES_ONLY: _found_by_shapes}
    if kernel in plain:
        return plain[kernel](q_BTNH, k_BTKH, v_BTKH, segments_BT, window).out_BTNH
    if kernel not in KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; there are {', '.join(KERNELS)}")
    return {"pallas": _attend_pallas, "splash": attend_splash}[kernel](q_BTNH, k_BTKH, v_BTKH, segments_BT, window)


def attend_with_evidence(
    each: tuple[Rows, ...], *, windows: tuple[int | None, ...], kernels: tuple[str, ...]
) -> tuple[Found, ...]:
    """`attend` for several resolutions of the same documents, with the evidence, through which gradients flow as well.

    For `EVIDENT_KERNELS`, to all of which the tokens of a block are heads of one row. Where cuDNN is asked for,
    summaries and narrow windows have kernels of our own, which move no query, take the gradient of the evidence by the
    way and need not know how many documents there are.
    """
    forms = {"reference": _found_by_reference, "xla": _found_by_blocks, "splash": found_by_splash}
    if "splash" in kernels and not gives_evidence():
        forms["splash"] = _found_by_blocks
    forms[SHAPES_ONLY] = _found_by_shapes
    on_gpu = [i for i, kernel in enumerate(kernels) if kernel == "cudnn"]
    narrow = lambda i: each[i].stride > 1 or (windows[i] or each[i].k_BIKH.shape[1]) <= _NARROW
    ours = [i for i in on_gpu if (narrow(i) or _are_unknown(each[i])) and fits_triton(each[i])]
    done = {i: found_by_triton(each[i], windows[i]) for i in ours}
    with_cudnn = [i for i in on_gpu if i not in done]
    by_blocks = lambda rows, window: _found_by_blocks(rows.q_BTNH, rows.k_BIKH, rows.v_BIKH, rows.segments_BI, window)
    found = found_by_cudnn([_in_blocks(each[i]) for i in with_cudnn], [windows[i] for i in with_cudnn], by_blocks)
    done |= {i: _of_tokens(each[i], f) for i, f in zip(with_cudnn, found, strict=True)}
    for i in set(range(len(each))) - set(on_gpu):
        done[i] = _of_tokens(each[i], forms[kernels[i]](*_in_blocks(each[i])[:4], windows[i]))
    return tuple(done[i] for i in range(len(each)))


def _are_unknown(rows: Rows) -> bool:
    """Whether nobody knows how many documents there are, or cuDNN cannot walk them: it would wait for the host to
    choose a program, or look at whole rows."""
    if rows.segments_BI is None:
        return False
    return not cudnn.walks_documents() or rows.documents is None or rows.documents.count_B is not None


def _in_blocks(rows: Rows) -> Rows:
    return rows._replace(q_BTNH=by_block(rows.q_BTNH, rows.stride, rows.k_BIKH.shape[2]))


def _of_tokens(rows: Rows, found: Found) -> Found:
    back = functools.partial(by_token, stride=rows.stride, kv_heads=rows.k_BIKH.shape[2])
    return Found(back(found.out_BTNH), back(found.evidence_BTN[..., None])[..., 0])


def _found_by_reference(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Found:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
    logits_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32)
    logits_BKGTS = jnp.where(attention_mask(T, segments, window)[:, :, None], logits_BKGTS, -jnp.inf)
    # Every row sees at least itself, so the softmax never divides by zero.
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v.dtype)
    out_BTNH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v).reshape(B, T, N, H)
    evidence_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    return Found(out_BTNH, evidence_BKGT.transpose(0, 3, 1, 2).reshape(B, T, N))


def _query_blocks(T: int, window: int | None) -> list[tuple[int, int, int]]:
    """(first query, end of queries, first key) of each block; the keys end with the queries."""
    size = max(min(_BLOCK, window or T), -(-T // _MOST_BLOCKS))  # of a short window, most of a larger block's scores are masked
    starts = range(0, T, size)
    return [(t, min(t + size, T), 0 if window is None else max(0, t - window + 1)) for t in starts]


def held_scores(T: int, window: int | None) -> int:
    """Scores of one head and row that the xla kernel forms, in all of its blocks: XLA keeps the masks of all."""
    return sum((end - first) * (end - low) for first, end, low in _query_blocks(T, window))


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
def _blocks(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> tuple[Array, Array]:
    """(what was found, the log of the softmax's sum, with a last axis of one)"""
    return _blocks_forward(q, k, v, segments, window)


def _blocks_fwd(q, k, v, segments, window):  # type: ignore[no-untyped-def]
    out, lse = _blocks_forward(q, k, v, segments, window)
    return (out, lse), (q, k, v, segments, out, lse)


def _blocks_bwd(window, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, segments, out, lse = saved
    dout, dlse = cotangents
    dtype = q.dtype
    # d score = weight * (dO . v - delta + dL): the sum's own gradient is spread over the scores by the same weights.
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True) - dlse
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


def _found_by_blocks(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Found:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BKGTH = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    out_BKGTH, lse_BKGT1 = _blocks(q_BKGTH, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments, window)
    back = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)
    return Found(back(out_BKGTH), back(lse_BKGT1)[..., 0])


@jax.custom_vjp
def _shapes(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return jax.lax.optimization_barrier((q, k, v, q[..., 0].astype(jnp.float32)))[::3]


def _shapes_fwd(q, k, v):  # type: ignore[no-untyped-def]
    out, lse = (checkpoint_name(x, FOUND) for x in _shapes(q, k, v))
    return (out, lse), (q, k, v, out, lse)


def _shapes_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    return jax.lax.optimization_barrier((*saved, *cotangents))[:3]


_shapes.defvjp(_shapes_fwd, _shapes_bwd)


def _found_by_shapes(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Found:
    return Found(*_shapes(q, k, v))


def _attend_pallas(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

    if window is not None:
        raise ValueError("the pallas GPU kernel has no window; use cudnn or xla")
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return gpu_attention.mha(q, k, v, segment_ids=segments, sm_scale=q.shape[-1] ** -0.5, causal=True)
