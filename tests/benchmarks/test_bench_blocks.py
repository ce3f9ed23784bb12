"""Matrix products, softmax, RoPE, joining heads."""

from __future__ import annotations

from collections.abc import Callable

from npattn._bench.problem import Case

GROUPS = ("matmul", "softmax", "rope", "heads")


def test_row(run_row: Callable[[Case, str], None], case: Case, who: str) -> None:
    run_row(case, who)
