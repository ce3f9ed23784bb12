"""Attention: prefill, batches, the smallest call, decoding."""

from __future__ import annotations

from collections.abc import Callable

from npattn._bench.problem import Case

GROUPS = ("prefill", "batch", "small call", "decode")


def test_row(run_row: Callable[[Case, str], None], case: Case, who: str) -> None:
    run_row(case, who)
