"""The documentation: the site builds without a warning, no link leads nowhere, and tables are what the code does."""

import itertools
import math
import re
from pathlib import Path

import jax
import pytest
import site_pages
from site_pages import PAGES, ROOT

from nash_mhc.config import cli, reference
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import RULES, logical_axes
from nash_mhc.train.resolve_devices import resolve
from nash_mhc.train.state import sharded_abstract_state


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site_pages.build(folder)
    return folder


def test_no_link_of_the_site_leads_nowhere(site: Path) -> None:
    broken, elsewhere = site_pages.broken_links(site)
    assert not broken, "\n".join(broken)
    assert elsewhere < 200  # to other sites, which are not followed: few, for they go stale
    assert {page.with_suffix(".html").name for page in PAGES[1:]} <= {page.name for page in site.glob("*.html")}


def test_pages_look_as_on_github_and_need_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES[1:]:
        text, shown = page.read_text(), (site / page.with_suffix(".html").name).read_text()
        fetched = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)"', shown)
        assert not fetched, page.name
        assert "arithmatex" not in shown, page.name  # a formula that was left as it stands
        languages = re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL)
        outside = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)  # of code
        formulas = languages.count("math")
        assert shown.count("<pre>") == len(languages) - formulas, page.name
        assert shown.count("<math") == formulas + len(re.findall(r"\$[^$]+\$", outside)), page.name
        assert not re.search(r"<p>[^<]*\n(?:[-*]|\d+\.) ", shown), page.name  # a list that became a paragraph


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_no_link_beside_the_site_leads_nowhere(page: Path) -> None:
    for link in site_pages.links_of_markdown(page):
        assert link.startswith("https://") or (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


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
