"""The functions of docs/conventions.md: they say how the calls of other systems map to ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pages import names_of


@pytest.fixture(scope="session")
def recipes() -> SimpleNamespace:
    return SimpleNamespace(**names_of("docs/conventions.md"))
