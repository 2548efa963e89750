"""A function of a few numbers a token as one GPU kernel (Pallas, Triton): they stay in registers from start to end.

Made for Sinkhorn's iteration, of which XLA would launch each of the 20 rounds as a kernel of its own. The arithmetic is that of
`sinkhorn.py` and `streams.py`, which works on tuples of arrays and does not care where they lie.
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
    outs: int,
    *,
    aside: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> list[Array]:  # fmt: skip
    """`body(vector of each argument, aside) -> vectors`, for every token: arguments and results are arrays over all tokens.

    `aside` is (how many vectors, how long each) there is room for.
    """
    shape, tokens = args[0].shape, args[0].size

    def kernel(*refs: Any) -> None:
        in_refs, out_refs, aside_ref = refs[: len(args)], refs[len(args) : -1], refs[-1]
        for ref, x in zip(out_refs, body([ref[:] for ref in in_refs], Aside(aside_ref, aside[1])), strict=True):
            ref[:] = x

    one = pl.BlockSpec((_TOKENS,), lambda i: (i,))
    shapes = [jax.ShapeDtypeStruct((tokens,), args[0].dtype)] * outs
    room = jax.ShapeDtypeStruct((aside[0] * aside[1], tokens), args[0].dtype)
    *results, _ = pl.pallas_call(
        kernel, out_shape=[*shapes, room], grid=(tokens // _TOKENS,), in_specs=[one] * len(args),
        out_specs=[*[one] * outs, pl.BlockSpec((room.shape[0], _TOKENS), lambda i: (0, i))],
        compiler_params=plgpu.CompilerParams(num_warps=_TOKENS // 32, num_stages=1), name="stream_maps", interpret=interpret,
    )(*(a.reshape(tokens) for a in args))  # fmt: skip
    return [r.reshape(shape) for r in results]
