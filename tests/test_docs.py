"""The documentation: the page of all keys is what the declarations say."""

from pathlib import Path

from nash_mhc.config import reference

ROOT = Path(__file__).parent.parent


def test_the_page_of_all_keys_is_the_one_that_the_declarations_make() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference.page(), f"a key has changed; run: {reference.COMMAND}"
