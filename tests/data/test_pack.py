"""Packing: nothing is lost, nothing is mixed, little is wasted."""

from collections import Counter

import numpy as np
import pytest

from nash_mhc.data.pack import Rows, best_fit, pack_pieces, split_document, unpack
from nash_mhc.data.stories import story

END = 99


def pack(documents: list[np.ndarray], end: int, seq_len: int, most_rows: int | None = None, *, align: int = 1) -> Rows:
    split = [piece for tokens in documents for piece in split_document(tokens, end, seq_len, begin=end)]
    return unpack(pack_pieces(split, end, seq_len, most_rows, align=align)[0], end)


def pieces(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Return (inputs, targets) of every segment of every row."""
    found = []
    for inputs, targets, segments in zip(rows.inputs, rows.targets, rows.segments, strict=True):
        found += [(inputs[segments == s].tolist(), targets[segments == s].tolist()) for s in range(1, segments.max() + 1)]
    return found


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    return [len(story(5, "train", i).text) + 1 for i in range(400)]


def random_documents(seed: int, count: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, END, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


# --- best_fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_places_every_item_once_and_never_overfills(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 101, rng.integers(1, 60)).tolist()
    rows = best_fit(sizes, 100)
    assert Counter(item for row in rows for item in row) == Counter(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in row) <= 100 for row in rows)
    # No two rows could have been one: every row was opened because nothing else had room.
    fullest = sorted(sum(sizes[item] for item in row) for row in rows)
    assert len(fullest) < 2 or fullest[0] + fullest[1] > 100


def test_best_fit_takes_the_tightest_row() -> None:
    # 7 and 6 open a row each; 3 fits both (3 and 4 left) and belongs where it leaves nothing, so that 4 still fits.
    assert best_fit([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]
    assert best_fit([10, 10], 10) == [[0], [1]]


def test_best_fit_drops_only_items_that_do_not_fit() -> None:
    sizes = [6, 6, 6, 4, 3, 1]
    rows = best_fit(sizes, 10, most_rows=2)
    placed = {item for row in rows for item in row}
    room = [10 - sum(sizes[item] for item in row) for row in rows]
    assert len(rows) == 2
    assert min(room) >= 0
    assert all(size > max(room) for item, size in enumerate(sizes) if item not in placed)


def test_best_fit_of_nothing() -> None:
    assert best_fit([], 10) == []


@pytest.mark.parametrize(("capacity", "waste"), [(1024, 0.08), (2048, 0.05), (4096, 0.05)])
def test_story_lengths_waste_little(lengths: list[int], capacity: int, waste: float) -> None:
    cut = [part for n in lengths for part in [capacity] * (n // capacity) + [n % capacity] if part]
    rows = best_fit(cut, capacity)
    assert 1 - sum(cut) / (len(rows) * capacity) < waste


# --- pack ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_every_document_comes_back_exactly_once(seed: int) -> None:
    documents = random_documents(seed, 60, longest=31)  # with its end marker, the longest just fills a row of 32
    rows = pack(documents, END, 32)
    wanted = Counter(((END, *d.tolist()), (*d.tolist(), END)) for d in documents)
    assert Counter((tuple(i), tuple(t)) for i, t in pieces(rows)) == wanted


def test_padding_is_at_the_end_and_has_no_weight() -> None:
    rows = pack(random_documents(3, 40, longest=20), END, 32)
    assert all(a.shape == rows.inputs.shape for a in rows)
    np.testing.assert_array_equal(rows.weights, (rows.segments > 0).astype(np.float32))
    for segments in rows.segments:
        used = segments[segments > 0]
        assert (segments[: len(used)] > 0).all()
        assert set(np.diff(used)) <= {0, 1}  # numbered from 1, each in one piece
        assert used[0] == 1
    assert (rows.inputs[rows.segments == 0] == END).all()
    assert (rows.targets[rows.segments == 0] == END).all()
    assert rows.weights.sum() == sum(len(d) + 1 for d in random_documents(3, 40, longest=20))


def test_rows_have_the_dtypes_of_the_train_step() -> None:
    rows = pack([np.arange(5)], END, 8)  # int64 tokens
    assert [a.dtype for a in rows] == [np.int32, np.int32, np.int32, np.float32]


@pytest.mark.parametrize("length", [7, 8, 15, 16, 17, 40])
def test_long_documents_are_cut_without_loss(length: int) -> None:
    document = np.arange(length, dtype=np.int32) % 90
    rows = pack([document], END, 8)
    whole = [END, *document.tolist(), END]
    parts = {tuple(i): t for i, t in pieces(rows)}
    inputs = [whole[at : min(at + 8, length + 1)] for at in range(0, length + 1, 8)]
    assert sorted(parts) == sorted(map(tuple, inputs))
    assert sorted(map(tuple, parts.values())) == sorted(
        tuple(whole[at + 1 : min(at + 8, length + 1) + 1]) for at in range(0, length + 1, 8)
    )
    # Each slot is followed by its target: every token, and the end, is predicted exactly once.
    assert sum(map(len, parts)) == rows.weights.sum() == length + 1
    assert [t for i in inputs for t in parts[tuple(i)]] == whole[1:]


def test_an_empty_document_is_one_end_token() -> None:
    rows = pack([np.zeros(0, np.int32)], END, 4)
    assert pieces(rows) == [([END], [END])]


def test_most_rows_fixes_the_number_of_rows() -> None:
    documents = random_documents(1, 40, longest=20)
    fewer, more = pack(documents, END, 32, most_rows=3), pack(documents, END, 32, most_rows=200)
    assert len(fewer.inputs) == 3
    assert len(more.inputs) == 200
    whole = {(END, *d.tolist()) for d in documents}
    assert {tuple(i) for i, _ in pieces(fewer)} < whole
    assert {tuple(i) for i, _ in pieces(more)} == whole
    assert (more.weights.sum(axis=1) == 0).any()


# --- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_aligned_documents_start_at_multiples_and_lose_nothing(seed: int) -> None:
    align, documents = 8, random_documents(seed, 60, longest=40)  # some are cut: rows of 32
    rows = pack(documents, END, 32, align=align)
    starts = np.flatnonzero(np.diff(rows.segments, axis=1, prepend=0).ravel() * (rows.segments.ravel() > 0)) % 32
    assert len(starts) > 60
    assert not (starts % align).any()
    # Every token and every end is a target once, in the order of the document, whatever lies in the gaps.
    kept = [
        (inputs[(segments == s) & (weights > 0)].tolist(), targets[(segments == s) & (weights > 0)].tolist())
        for inputs, targets, segments, weights in zip(*rows, strict=True)
        for s in range(1, segments.max() + 1)
    ]
    whole = [[END, *d.tolist(), END] for d in documents]
    cut = [(w[at : at + 32], w[at + 1 : at + 33]) for w in whole for at in range(0, len(w) - 1, 32)]
    cut = [(i[: len(t)], t) for i, t in cut]
    assert Counter((tuple(i), tuple(t)) for i, t in kept) == Counter((tuple(i), tuple(t)) for i, t in cut)


def test_a_gap_belongs_to_the_document_before_it_and_has_no_weight() -> None:
    rows = pack([np.arange(4), np.arange(10, 13)], END, 24, align=8)  # 5 and 4 slots of text
    assert rows.segments.tolist() == [[1] * 8 + [2] * 8 + [0] * 8]
    assert rows.weights.tolist() == [[1.0] * 5 + [0.0] * 3 + [1.0] * 4 + [0.0] * 12]
    assert rows.inputs[0].tolist() == [END, 0, 1, 2, 3, END, END, END, END, 10, 11, 12, *[END] * 12]


@pytest.mark.parametrize("align", [2, 8, 27])
def test_every_aligned_block_is_in_one_document(align: int) -> None:
    rows = pack(random_documents(2, 80, longest=50), END, 108 // align * align, align=align)
    blocks = rows.segments.reshape(len(rows.segments), -1, align)
    assert (blocks == blocks[:, :, :1]).all()
    assert (rows.weights[rows.segments == 0] == 0).all()
    # Rows hold several documents: a packer that gave each a row of its own would pass all of the above.
    assert rows.segments.max() >= 3


def test_aligned_best_fit_counts_the_gaps() -> None:
    """Three documents of 5 slots fit a row of 16 tokens, but not of two blocks of 8."""
    documents = [np.arange(4)] * 3
    assert len(pack(documents, END, 16).inputs) == 1
    assert len(pack(documents, END, 16, align=8).inputs) == 2
