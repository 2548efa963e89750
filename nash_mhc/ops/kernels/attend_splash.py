"""JAX's splash attention kernel for TPUs, with and without its log-sum-exp."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from nash_mhc.ops.attention_io import ATTENDED, AttentionOutput, with_lse_gradient
from nash_mhc.runtime.compat.jax import splash_passes


def _kernel(group: int, T: int, window: int | None) -> Any:
    """Return the kernel for `group` query heads that share a key head.

    Its mask tables must be concrete arrays, outside the current trace (the backward pass is traced separately) and the
    current mesh (whose devices may be absent in `bench compile`). Both are thread-local, so another thread builds them.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.CausalMask((T, T)) if window is None else splash.LocalMask((T, T), (window - 1, 0), 0)
    block = next(size for size in (512, 384, 256, 128) if T % size == 0)  # `unsupported_reason` ensures a match
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip

    def make() -> Any:
        masks = splash.MultiHeadMask([mask] * group)
        kernel = splash.make_splash_mqa_single_device(mask=masks, block_sizes=sizes, residual_checkpoint_name=ATTENDED)
        return jax.tree.map(np.asarray, kernel)

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _with_lse(kernel: Any) -> Callable[..., tuple[Array, Array]]:
    """Return a function to (output, log-sum-exp) for one key head. The kernel itself takes no gradient of the lse."""
    passes = splash_passes()
    assert passes is not None
    forward_pass, backward_pass = passes
    options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}

    def forward(q: Array, k: Array, v: Array, ids: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        out, (sums,) = forward_pass(kernel.fwd_mask_info, q, k, v, ids, None, save_residuals=True, **options)
        out, sums = checkpoint_name(out, ATTENDED), checkpoint_name(sums, ATTENDED)
        return (out, sums), (q, k, v, ids, out, sums)

    def backward(saved: tuple[Any, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
        q, k, v, ids, out, sums = saved
        dout, dlse = cotangents
        out = with_lse_gradient(out, dout, dlse)
        names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function", "attn_logits_soft_cap")
        settings = (False, *(options[name] for name in names), options["interpret"])
        state = (q, k, v, ids, None, out, sums, kernel.dq_mask_info, kernel.dkv_mask_info)
        return (*backward_pass(*settings, state, dout)[3:6], None)

    attended = jax.custom_vjp(lambda *rows: forward(*rows)[0])
    attended.defvjp(forward, backward)
    return attended


def _over_heads(
    form: Callable[[Any], Callable[..., Any]], q: Array, k: Array, v: Array, segments: Array | None, window: int | None
) -> Any:
    """Apply `form(kernel)` to every sequence and key head. Results begin with the axes [B, K, G, T]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, N, H = q.shape
    K = k.shape[2]
    # The kernel needs whole lanes of 128. Zero columns change neither the scores nor the first H values.
    pad = -H % 128
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad))) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v))
    q_BKGTH = q.reshape(B, T, K, N // K, H + pad).transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
    over_heads = jax.vmap(form(_kernel(N // K, T, window)), in_axes=(0, 0, 0, None))
    return jax.vmap(over_heads)(q_BKGTH, k_BKTH, v_BKTH, ids)


def _to_BTNH(x_BKGTH: Array, H: int) -> Array:
    B, K, G, T, _ = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, -1)[..., :H]


def attend_splash(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> Array:
    return _to_BTNH(_over_heads(lambda kernel: kernel, q, k, v, segments, window), q.shape[-1])


def attend_splash_with_lse(q: Array, k: Array, v: Array, segments: Array | None, window: int | None) -> AttentionOutput:
    out_BKGTH, sums_BKGT = _over_heads(_with_lse, q, k, v, segments, window)
    return AttentionOutput(_to_BTNH(out_BKGTH, q.shape[-1]), _to_BTNH(sums_BKGT[..., None], 1)[..., 0])
