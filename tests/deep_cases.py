"""Of many cases of one promise a few are in `make test`; `make test-deep` has the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def deep_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, of which all but `kept` are deep."""
    cases = list(cases)
    missing = [each for each in kept if each not in cases]
    assert not missing, f"these are not among the cases: {missing}"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.deep) for case in cases]
