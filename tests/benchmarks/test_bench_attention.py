"""Attention: prefill, batches, the smallest call, decoding from arrays and from caches."""

from __future__ import annotations

from collections.abc import Callable

from npattn._bench.problem import Case

GROUPS = ("prefill", "batch", "small call", "decode", "cache")


def test_row(run_row: Callable[[Case, str], None], case: Case, who: str) -> None:
    run_row(case, who)
