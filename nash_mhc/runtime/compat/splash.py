"""Splash attention (TPU) of jax.experimental: its forward and backward passes with the log-sum-exp."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as _splash

SEEN = ("0.10.2", "0.11.2")  # of jax


def is_available() -> bool:
    """Return whether `forward` and `backward` exist; otherwise attention with log-sum-exp uses plain XLA."""
    return hasattr(_splash, "_splash_attention_forward") and hasattr(_splash, "_splash_attention_bwd")


def forward(*operands: Any, **options: Any) -> Any:
    return _splash._splash_attention_forward(*operands, **options)


def backward(*operands: Any) -> Any:
    run: Any = _splash._splash_attention_bwd
    return run(*operands)
