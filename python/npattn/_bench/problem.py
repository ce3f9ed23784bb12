"""What a row of the benchmark is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .plain import Array

Limit = Literal["fma", "read"]
Kind = Literal["attention", "matmul", "softmax", "log_softmax", "layer"]  # of what a peer is to compute


@dataclass(frozen=True)
class PeerTask:
    """A row as another library's process gets it: what to compute, on which arrays, with which options."""

    kind: Kind
    arrays: tuple[Array, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One row, ready to run: the calls, the work they do, and the right answer.

    `amount` is the work of one call: floating-point operations where the limit is "fma", bytes that must move
    where it is "read". `sample` takes from a result the part that `exact` holds, in float64 or wider.
    """

    dtype: np.dtype[Any]
    limit: Limit
    amount: float
    npattn: Callable[[], Array]
    numpy: Callable[[], Array]
    sample: Callable[[Array], Array]
    exact: Array
    allowed: float | None = None  # largest error, of the largest result; None: what the dtype rounds to
    peer: PeerTask | None = None
    extra: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # timed beside it, not compared


@dataclass(frozen=True)
class Case:
    """A row by name; `build` makes its arrays."""

    group: str
    name: str
    build: Callable[[], Problem]


def errors(result: Array, exact: Array) -> tuple[float, float]:
    """Largest and root-mean-square difference of `result` to `exact`."""
    difference = result.astype(exact.dtype) - exact
    return float(np.abs(difference).max()), float(np.sqrt(np.mean(difference**2)))
