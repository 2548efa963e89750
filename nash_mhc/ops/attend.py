"""Causal attention over packed documents, with a choice of kernels.

`reference` computes all scores at once; every other kernel is tested against it. `xla` runs anywhere: it loops over
blocks of queries, skips keys that none of them may see, and recomputes scores in the backward pass. On a CPU a step
takes two thirds of the reference's time (docs/experiments.md).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from nash_mhc.ops.attention_io import ATTENDED, AttentionInput, AttentionOutput, Documents, by_block, by_token
from nash_mhc.ops.kernels.attend_cudnn import attend_cudnn, attend_cudnn_with_lse
from nash_mhc.ops.kernels.attend_splash import attend_splash, attend_splash_with_lse
from nash_mhc.ops.kernels.attend_triton import attend_triton_with_lse, fits_triton
from nash_mhc.ops.platform import sums_in_any_order
from nash_mhc.runtime.compat import cudnn
from nash_mhc.runtime.compat.jax import splash_passes

PLAIN_KERNELS = ("reference", "xla")  # array code that the partitioner can split; the others are opaque to it
KERNELS = (*PLAIN_KERNELS, "cudnn", "splash")
SHAPES_ONLY = "shapes"  # computes nothing; has the inputs, outputs and residuals of a flash kernel, for memory traces

_BLOCK = 64  # queries per block of the xla kernel
_MOST_BLOCKS = 8  # blocks that the xla kernel unrolls at most
# Visible keys per query up to which the Triton kernels are faster than cuDNN (docs/experiments.md). They always sum in
# the same order, at no cost; cuDNN takes up to 1.6 times as long for that.
_NARROW, _NARROW_IN_ORDER = 1024, 2048


def unsupported_reason(kernel: str, platform: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str | None:
    """Return why a kernel cannot run there, or None if it can."""
    home = {"cudnn": "gpu", "splash": "tpu"}.get(kernel, platform)
    if platform != home:
        return f"runs on {home}, not on {platform}"
    if kernel == "cudnn" and dtype != "bfloat16":
        return f"takes bfloat16, not {dtype}"
    if kernel == "cudnn" and (head_dim % 8 or head_dim > 128 or seq_len % 2):
        return f"takes an even T and heads of 8, 16, ... 128, not T {seq_len} and heads of {head_dim}"
    if kernel == "splash" and seq_len % 128:
        return f"takes a T that is a multiple of 128, not {seq_len}"
    return None


def best_kernel(platform: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str:
    """Return the kernel for `--attention auto`: the platform's flash attention if it takes these shapes, else xla."""
    wanted = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "xla")
    return "xla" if unsupported_reason(wanted, platform, dtype, seq_len, head_dim, window) else wanted


def supported_kernel(kernel: str, dtype: str, seq_len: int, head_dim: int, window: int | None) -> str:
    """Return `kernel` if it supports these shapes, else xla: coarse scales may be too short for a flash kernel."""
    home = {"cudnn": "gpu", "splash": "tpu"}.get(kernel, "cpu")
    return "xla" if unsupported_reason(kernel, home, dtype, seq_len, head_dim, window) else kernel


def _attention_mask(
    queries: slice, keys: slice, segments_BT: Int[Array, "B T"] | None, window: int | None
) -> Bool[Array, "#B Q S"]:
    """Return whether query t (rows) sees key s (columns): s <= t, in the same document and within the window."""
    t, s = jnp.arange(queries.start, queries.stop)[:, None], jnp.arange(keys.start, keys.stop)[None, :]
    mask = s <= t
    if window is not None:
        mask = mask & (t - s < window)
    mask = mask[None]
    if segments_BT is not None:
        mask = mask & (segments_BT[:, queries, None] == segments_BT[:, None, keys])
    return mask


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
    """Return softmax(q k^T / sqrt(H)) v: causal, within a document, over the last `window` tokens. K divides N."""
    if kernel == "cudnn":
        inputs = AttentionInput(q_BTNH, k_BTKH, v_BTKH, segments_BT, documents)
        use_triton = (_is_narrow(inputs, window) or _cudnn_would_wait(inputs)) and fits_triton(inputs)
        return attend_triton_with_lse(inputs, window).out_BTNH if use_triton else attend_cudnn(inputs, window)
    plain = {"reference": _attend_reference, "xla": _attend_blocks, SHAPES_ONLY: _attend_shapes}
    if kernel in plain:
        return plain[kernel](q_BTNH, k_BTKH, v_BTKH, segments_BT, window).out_BTNH
    if kernel not in KERNELS:
        raise ValueError(f"unknown attention kernel {kernel!r}; choose from {', '.join(KERNELS)}")
    return attend_splash(q_BTNH, k_BTKH, v_BTKH, segments_BT, window)


def attend_with_lse(
    inputs: tuple[AttentionInput, ...], *, windows: tuple[int | None, ...], kernels: tuple[str, ...]
) -> tuple[AttentionOutput, ...]:
    """Run `attend` at several resolutions of the same documents. The log-sum-exp is differentiable, too.

    The queries of a block are passed as heads of one row. For `cudnn`, summaries and narrow windows use the Triton
    kernels instead: these move no query, and need not know the number of documents.
    """
    functions = {"reference": _attend_reference, "xla": _attend_blocks, "splash": attend_splash_with_lse}
    if "splash" in kernels and splash_passes() is None:
        functions["splash"] = _attend_blocks
    functions[SHAPES_ONLY] = _attend_shapes
    on_gpu = [i for i, kernel in enumerate(kernels) if kernel == "cudnn"]
    suits_triton = lambda i: _is_narrow(inputs[i], windows[i]) or _cudnn_would_wait(inputs[i])
    with_triton = [i for i in on_gpu if suits_triton(i) and fits_triton(inputs[i])]
    outputs = {i: attend_triton_with_lse(inputs[i], windows[i]) for i in with_triton}
    with_cudnn = [i for i in on_gpu if i not in outputs]
    fallback = lambda x, window: _attend_blocks(x.q_BTNH, x.k_BIKH, x.v_BIKH, x.segments_BI, window)
    by_cudnn = attend_cudnn_with_lse(
        [_queries_by_block(inputs[i]) for i in with_cudnn], [windows[i] for i in with_cudnn], fallback
    )
    outputs |= {i: _output_by_token(inputs[i], out) for i, out in zip(with_cudnn, by_cudnn, strict=True)}
    for i in set(range(len(inputs))) - set(on_gpu):
        outputs[i] = _output_by_token(inputs[i], functions[kernels[i]](*_queries_by_block(inputs[i])[:4], windows[i]))
    return tuple(outputs[i] for i in range(len(inputs)))


def _is_narrow(inputs: AttentionInput, window: int | None) -> bool:
    limit = _NARROW if sums_in_any_order() else _NARROW_IN_ORDER
    return inputs.stride > 1 or min(window or limit + 1, inputs.k_BIKH.shape[1]) <= limit


def _cudnn_would_wait(inputs: AttentionInput) -> bool:
    """Return whether cuDNN would wait for the host to count documents, or mask whole sequences."""
    if inputs.segments_BI is None:
        return False
    return not cudnn.supports_document_masks() or inputs.documents is None or inputs.documents.count_B is not None


def _queries_by_block(inputs: AttentionInput) -> AttentionInput:
    return inputs._replace(q_BTNH=by_block(inputs.q_BTNH, inputs.stride, inputs.k_BIKH.shape[2]))


def _output_by_token(inputs: AttentionInput, output: AttentionOutput) -> AttentionOutput:
    to_tokens = functools.partial(by_token, stride=inputs.stride, kv_heads=inputs.k_BIKH.shape[2])
    return AttentionOutput(to_tokens(output.out_BTNH), to_tokens(output.lse_BTN[..., None])[..., 0])


def _attend_reference(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> AttentionOutput:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H) * jnp.asarray(H**-0.5, q.dtype)
    logits_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32)
    mask_BTS = _attention_mask(slice(0, T), slice(0, T), segments, window)
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, -jnp.inf)
    # Every token sees at least itself, so the softmax never divides by zero.
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v.dtype)
    out_BTNH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v).reshape(B, T, N, H)
    lse_BKGT = jax.nn.logsumexp(logits_BKGTS, axis=-1)
    return AttentionOutput(out_BTNH, lse_BKGT.transpose(0, 3, 1, 2).reshape(B, T, N))


def _query_blocks(T: int, window: int | None) -> list[tuple[int, int, int]]:
    """Return (first query, end of queries, first key) of each block. The keys end with the queries."""
    size = max(min(_BLOCK, window or T), -(-T // _MOST_BLOCKS))  # blocks larger than the window would be mostly masked
    starts = range(0, T, size)
    return [(t, min(t + size, T), 0 if window is None else max(0, t - window + 1)) for t in starts]


def _block_scores(q: Array, k: Array, segments: Array | None, window: int | None, block: tuple[int, int, int]) -> Array:
    """Return masked scores [B, K, G, t, s] of one block, from queries [B, K, G, T, H] and keys [B, K, T, H]."""
    first, end, low = block
    scores = jnp.einsum("bkgth,bksh->bkgts", q[:, :, :, first:end], k[:, :, low:end], preferred_element_type=jnp.float32)
    mask_BTS = _attention_mask(slice(first, end), slice(low, end), segments, window)
    return jnp.where(mask_BTS[:, None, None], scores, -jnp.inf)


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
    """Return (output, log-sum-exp with a last axis of size 1)."""
    return _blocks_forward(q, k, v, segments, window)


def _blocks_fwd(q, k, v, segments, window):  # type: ignore[no-untyped-def]
    out, lse = _blocks_forward(q, k, v, segments, window)
    return (out, lse), (q, k, v, segments, out, lse)


def _blocks_bwd(window, saved, cotangents):  # type: ignore[no-untyped-def]
    q, k, v, segments, out, lse = saved
    dout, dlse = cotangents
    dtype = q.dtype
    # d score = weight * (dO . v - delta + dL): the gradient of the lse is spread over the scores by the same weights.
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


def _attend_blocks(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> AttentionOutput:
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BKGTH = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    out_BKGTH, lse_BKGT1 = _blocks(q_BKGTH, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments, window)
    back = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)
    return AttentionOutput(back(out_BKGTH), back(lse_BKGT1)[..., 0])


@jax.custom_vjp
def _shapes(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return jax.lax.optimization_barrier((q, k, v, q[..., 0].astype(jnp.float32)))[::3]


def _shapes_fwd(q, k, v):  # type: ignore[no-untyped-def]
    out, lse = (checkpoint_name(x, ATTENDED) for x in _shapes(q, k, v))
    return (out, lse), (q, k, v, out, lse)


def _shapes_bwd(saved, cotangents):  # type: ignore[no-untyped-def]
    return jax.lax.optimization_barrier((*saved, *cotangents))[:3]


_shapes.defvjp(_shapes_fwd, _shapes_bwd)


def _attend_shapes(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> AttentionOutput:
    return AttentionOutput(*_shapes(q, k, v))
