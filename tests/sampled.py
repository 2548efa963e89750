"""Cases for `make test-long` alone, beside those of which each kind is in every run of the tests."""

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
