"""A function of a token's few numbers as one GPU kernel (Pallas, Triton): they stay in registers from start to end.

XLA would launch each round of the doubly stochastic maps as a kernel of its own. R x R numbers are no array that
Triton knows, so the function takes and returns tuples of numbers, as `doubly_stochastic.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_TOKENS = 128  # per block: one per thread


def fits(shape: tuple[int, ...]) -> bool:
    """Whether tokens of this shape can be cut into whole blocks."""
    return math.prod(shape) % _TOKENS == 0


def over_tokens(
    body: Callable[[list[Array]], Sequence[Array]], args: Sequence[Array], width: int, *, interpret: bool = False
) -> Array:
    """Return the array [..., width] of `body(columns of all args)` for every token; `args` are arrays [..., m]."""
    shape = args[0].shape[:-1]
    tokens = math.prod(shape)

    def kernel(*refs: Any) -> None:
        *in_refs, out_ref = refs
        # Column by column: neighbours share a cache line, so memory is still read once.
        columns = [ref[:, m] for ref in in_refs for m in range(ref.shape[1])]
        for m, x in enumerate(body(columns)):
            out_ref[:, m] = x

    block = lambda width: pl.BlockSpec((_TOKENS, width), lambda i: (i, 0))
    out = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((tokens, width), args[0].dtype), grid=(tokens // _TOKENS,),
        in_specs=[block(a.shape[-1]) for a in args], out_specs=block(width),
        compiler_params=plgpu.CompilerParams(num_warps=_TOKENS // 32, num_stages=1), name="stream_maps", interpret=interpret,
    )(*(a.reshape(tokens, a.shape[-1]) for a in args))  # fmt: skip
    return out.reshape(*shape, width)
