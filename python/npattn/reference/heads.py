"""Splitting an embedding into heads, and putting the heads back side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def split_heads(x: ArrayLike, num_heads: int, *, copy: bool = False) -> NDArray[Any]:
    """(..., L, H*E) -> (..., H, L, E): y[..., h, l, e] = x[..., l, h * E + e]."""
    rows: NDArray[Any] = np.asarray(x)
    width = rows.shape[-1] // num_heads
    heads: NDArray[Any] = rows.reshape(*rows.shape[:-1], num_heads, width).swapaxes(-2, -3)
    return heads.copy() if copy else heads


def merge_heads(x: ArrayLike) -> NDArray[Any]:
    """(..., H, L, E) -> (..., L, H*E): y[..., l, h * E + e] = x[..., h, l, e]."""
    rows: NDArray[Any] = np.asarray(x).swapaxes(-2, -3)
    return rows.reshape(*rows.shape[:-2], rows.shape[-2] * rows.shape[-1])
