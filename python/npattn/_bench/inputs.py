"""Dtypes by name, and the arrays of the rows: the same on every run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .plain import Array

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SAMPLED_OUTPUTS = 20_000  # a row, for the errors


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name; bfloat16 is that of ml_dtypes, an ImportError where that is missing."""
    return np.dtype(import_module("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What NumPy computes in for this dtype: it has no products of half types that are worth the name."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What the errors of this dtype are measured in."""
    return np.dtype(np.longdouble) if dtype == FLOAT64 else FLOAT64


def normal(dtype: np.dtype[Any], *shapes: tuple[int, ...]) -> list[Array]:
    """Normal numbers."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, computed_in(dtype)).astype(dtype, copy=False) for shape in shapes]


def sampled(length: int, outputs_each: int) -> NDArray[np.intp]:
    """Evenly spaced indices along an axis, `outputs_each` outputs each, SAMPLED_OUTPUTS in all."""
    count = min(length, -(-SAMPLED_OUTPUTS // outputs_each))
    return np.unique(np.linspace(0, length - 1, count).astype(np.intp))
