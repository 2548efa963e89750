"""A function of a few numbers a token as one GPU kernel (Pallas, Triton): they stay in registers from start to end.

Made for Sinkhorn's iteration, of which XLA would launch each of the 20 rounds as a kernel of its own. The arithmetic is
that of `sinkhorn.py` and `streams.py`, which works on tuples of arrays and does not care where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

_TOKENS = 128  # in a block: one a thread


def fits(shape: tuple[int, ...]) -> bool:
    """Whether tokens of this shape can be cut into whole blocks."""
    return math.prod(shape) % _TOKENS == 0


class Aside(NamedTuple):
    """Room for R numbers a token, many times over, in the device's memory: a thread reads back what it wrote itself."""

    ref: Any
    size: int

    def write(self, n: Any, vector: Sequence[Array]) -> None:
        for i, x in enumerate(vector):
            self.ref[n * self.size + i, :] = x

    def read(self, n: Any) -> tuple[Array, ...]:
        return tuple(self.ref[n * self.size + i, :] for i in range(self.size))


def over_tokens(
    body: Callable[..., Sequence[Array]],
    args: Sequence[Array],
    outs: Sequence[int],
    *,
    aside: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> list[Array]:
    """`body(numbers, aside) -> numbers` for every token:
    `args` are arrays [..., m], whose columns it gets one after another.

    Its results fill arrays [..., m] of the widths `outs`.
    `aside` is (how many vectors, how long each) there is room for.
    """
    shape = args[0].shape[:-1]
    tokens = math.prod(shape)

    def kernel(*refs: Any) -> None:
        in_refs, out_refs, aside_ref = refs[: len(args)], refs[len(args) : -1], refs[-1]
        # Column by column: neighbours share a cache line, so that memory is still read once.
        columns = [ref[:, m] for ref in in_refs for m in range(ref.shape[1])]
        places = [(ref, m) for ref in out_refs for m in range(ref.shape[1])]
        for (ref, m), x in zip(places, body(columns, Aside(aside_ref, aside[1])), strict=True):
            ref[:, m] = x

    block = lambda width: pl.BlockSpec((_TOKENS, width), lambda i: (i, 0))
    shapes = [jax.ShapeDtypeStruct((tokens, width), args[0].dtype) for width in outs]
    room = jax.ShapeDtypeStruct((aside[0] * aside[1], tokens), args[0].dtype)
    *results, _ = pl.pallas_call(
        kernel, out_shape=[*shapes, room], grid=(tokens // _TOKENS,), in_specs=[block(a.shape[-1]) for a in args],
        out_specs=[*[block(width) for width in outs], pl.BlockSpec((room.shape[0], _TOKENS), lambda i: (0, i))],
        compiler_params=plgpu.CompilerParams(num_warps=_TOKENS // 32, num_stages=1), name="stream_maps", interpret=interpret,
    )(*(a.reshape(tokens, a.shape[-1]) for a in args))  # fmt: skip
    return [r.reshape(*shape, r.shape[-1]) for r in results]
