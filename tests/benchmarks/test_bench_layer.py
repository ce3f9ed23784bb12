"""The multi-head attention layer."""

from __future__ import annotations

from collections.abc import Callable

from npattn._bench.problem import Case

GROUPS = ("layer",)


def test_row(run_row: Callable[[Case, str], None], case: Case, who: str) -> None:
    run_row(case, who)
