"""The matrix product in float64, and the matrix that is multiplied by."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ._common import Array, float64, ieee


@ieee
def matmul(a: ArrayLike, b: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """c[..., i, j] = sum_k a[..., i, k] b[..., k, j], np.matmul's shapes; float64 whatever ``dtype``."""
    return float64(a) @ float64(b)


def pack_matrix(b: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """The matrix b itself in float64: packing changes its place in memory alone; int8 leaves this of it."""
    if dtype is not None and np.dtype(dtype) == np.int8:
        q, scale = quantized(b, axis=0)
        return q * scale
    return float64(b)


@ieee
def quantized(x: ArrayLike, axis: int) -> tuple[Array, Array]:
    """(q, scale): x is about q scale, q = round(127 x / max |x|) and scale = max |x| / 127 along ``axis``.

    An int8 product quantizes the columns of b when it is packed and the rows of a when it multiplies:
    c_ij = scale_i scale_j sum_k q_ik q_kj, the sum in integers. What is not finite makes its row NaN.
    """
    values = float64(x)
    largest = np.max(np.abs(values), axis=axis, keepdims=True, initial=0.0)
    q = np.where(np.isfinite(largest), np.rint(values * np.where(largest > 0, 127.0 / largest, 0.0)), 0.0)
    return q, np.where(np.isfinite(largest), largest / 127.0, np.nan)
