"""The documentation: what its pages say about keys and sharding is what the code does."""

import itertools
import math
from pathlib import Path

import jax

from nash_mhc.config import cli, reference
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import RULES, logical_axes
from nash_mhc.train.resolve_devices import resolve
from nash_mhc.train.state import sharded_abstract_state

ROOT = Path(__file__).parent.parent


def test_the_page_of_all_keys_is_the_one_that_the_declarations_make() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference.page(), f"a key has changed; run: {reference.COMMAND}"


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the rows of the table whose head begins with `first`, without backticks."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :])
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def test_the_tables_of_the_page_about_sharding_are_what_the_code_does() -> None:
    config, mesh = resolve(cli.parse("--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2".split()).config)
    model = sharded_abstract_state(config, mesh).model
    x = lambda shape: " x ".join(map(str, shape))
    written = {row[0]: (row[1], row[4]) for row in table("sharding.md", "parameter")}
    found = named_leaves(model).items()
    assert written == {name: (x(leaf.shape), x(leaf.sharding.shard_shape(leaf.shape))) for name, leaf in found}
    axes = jax.tree.leaves(logical_axes(model), is_leaf=lambda names: isinstance(names, tuple))  # in the order of `found`
    for (name, _, over_fsdp, over_tp, _), names in zip(table("sharding.md", "parameter"), axes, strict=True):
        split = {RULES[axis]: axis for axis in names if RULES[axis]}
        assert (split.get(("fsdp",), "-"), split.get(("tp",), "-")) == (over_fsdp, over_tp), name
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for _, leaf in found)
    page = (ROOT / "docs" / "sharding.md").read_text()
    assert f"Each device holds {held:,} of the {sum(leaf.size for _, leaf in found):,} numbers" in page
    rules = {
        axis: tuple(over.split(" x "))
        for what, over in table("sharding.md", "axis of an array")
        for axis in what.partition(":")[0].split(", ")
    }
    assert rules == {axis: over for axis, over in RULES.items() if over}
    assert all(f"`{axis}`" in page for axis in RULES)
