"""The order of rows: permutations, epochs and mixtures by position alone."""

from collections import Counter

import numpy as np
import pytest

from nash_mhc.data.order import BLOCK, assign_sources, combine, counts_before, exact_shares, permuted, shuffled


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 64, 65, 1000, 4097])
def test_every_position_comes_once(count: int) -> None:
    for key in (0, 1, 2**63):
        assert sorted(permuted(np.arange(count), count, key)) == list(range(count))


def test_keys_give_unrelated_orders() -> None:
    count = 5000
    orders = np.array([permuted(np.arange(count), count, combine(seed, 0, 0)) for seed in range(20)])
    for i, order in enumerate(orders):
        # A random permutation keeps one place on average, and agrees with another in one.
        assert (order == np.arange(count)).sum() < 10
        assert all((order == other).sum() < 10 for other in orders[:i])
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.06
        # Neighbours are as far apart as any two rows: a third of the range.
        assert np.abs(np.diff(order)).mean() / count == pytest.approx(1 / 3, abs=0.02)


def test_shuffling_is_uniform_over_the_epoch() -> None:
    """Compare twentieths of the epoch with twentieths of the data by a chi-squared test."""
    count, parts = 40_000, 20
    order = permuted(np.arange(count), count, combine(7, 0, 0))
    table = np.zeros((parts, parts))
    np.add.at(table, (np.arange(count) * parts // count, order * parts // count), 1)
    expected = count / parts**2
    chi2 = ((table - expected) ** 2 / expected).sum() / (parts - 1) ** 2
    assert 0.7 < chi2 < 1.3


def test_far_positions_of_huge_data_are_reached_at_once() -> None:
    count = 10**12 + 39
    rows = permuted(np.arange(count - 1000, count), count, 5)
    assert len(set(rows.tolist())) == 1000
    assert rows.min() >= 0
    assert rows.max() < count


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must read the same order after an upgrade: these numbers never change."""
    assert permuted(np.arange(10), 10, combine(0, 0, 0)).tolist() == GOLDEN_PERMUTATION
    sources, inner = assign_sources(np.arange(8), exact_shares(["0.7", "0.3"]), seed=0)
    assert list(zip(sources.tolist(), inner.tolist(), strict=True)) == GOLDEN_MIXTURE


GOLDEN_PERMUTATION = [9, 2, 8, 5, 4, 1, 0, 6, 7, 3]
GOLDEN_MIXTURE = [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


def test_each_epoch_reads_every_row_once_in_a_new_order() -> None:
    rows = shuffled(np.arange(300), 100, seed=3)
    epochs = rows.reshape(3, 100)
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert (shuffled(np.arange(300), 100, seed=4) != rows).mean() > 0.9
    assert (shuffled(np.arange(300), 100, seed=3, source=1) != rows).mean() > 0.9
    scattered = np.array([299, 5, 100, 99, 0])
    assert shuffled(scattered, 100, seed=3).tolist() == rows[scattered].tolist()


# --- mixtures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [["0.7", "0.3"], ["1", "1", "1"], ["0.001", "0.999"], ["3", "2", "0.1", "0.1"]])
def test_a_mixture_keeps_its_shares_and_skips_nothing(weights: list[str]) -> None:
    parts = exact_shares(weights)
    count = 3 * BLOCK
    sources, inner = assign_sources(np.arange(count), parts, seed=1)
    for number, part in enumerate(parts):
        mine = inner[sources == number]
        assert mine.tolist() == list(range(len(mine)))  # its own positions one after the other
        for block in range(3):
            assert abs((sources[block * BLOCK :][:BLOCK] == number).sum() - part * BLOCK) <= 1
    assert sum(counts_before(count, parts)) == count


def test_sources_are_mixed_finely() -> None:
    sources, _ = assign_sources(np.arange(BLOCK), exact_shares(["0.7", "0.3"]), seed=1)
    batches = sources[: BLOCK // 64 * 64].reshape(-1, 64).sum(axis=1)
    assert batches.min() > 5
    assert batches.max() < 35
    assert len(Counter(batches.tolist())) > 5  # not a fixed pattern either


def test_assignments_do_not_depend_on_the_requested_positions() -> None:
    parts = exact_shares(["0.7", "0.2", "0.1"])
    whole = assign_sources(np.arange(2 * BLOCK + 500), parts, seed=9)
    scattered = np.random.default_rng(0).permutation(2 * BLOCK + 500)[:700]
    for got, want in zip(assign_sources(scattered, parts, seed=9), whole, strict=True):
        assert got.tolist() == want[scattered].tolist()
