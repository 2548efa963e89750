"""What attention works on, and what it finds."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Documents(NamedTuple):
    """Where the documents of each row lie, for kernels that walk them one by one; those beyond the room are left out."""

    lengths_BM: Int[Array, "B M"]  # 0: no such document
    starts_BM: Int[Array, "B M"]
    number_BT: Int[Array, "B T"]  # of the document that a token is in, counted in its row
    count_B: Int[Array, "B"] | None  # None: there is room for all, whatever the rows hold


class Rows(NamedTuple):
    """What attention needs of one resolution of a batch."""

    q_BTNH: Float[Array, "B T N H"]
    k_BTKH: Float[Array, "B T K H"]
    v_BTKH: Float[Array, "B T K H"]
    segments_BT: Int[Array, "B T"] | None = None
    documents: Documents | None = None  # of `segments_BT`, where they were found once for all layers


class Found(NamedTuple):
    """What attention found, and how much: the log of the sum that its softmax divides by."""

    out_BTNH: Float[Array, "B T N H"]
    evidence_BTN: Float[Array, "B T N"]
