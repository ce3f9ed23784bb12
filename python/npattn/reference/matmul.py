"""The matrix product in float64, and the matrix that is multiplied by."""

from __future__ import annotations

from numpy.typing import ArrayLike, DTypeLike

from ._common import Array, float64, ieee


@ieee
def matmul(a: ArrayLike, b: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """c[..., i, j] = sum_k a[..., i, k] b[..., k, j], np.matmul's shapes; float64 whatever ``dtype``."""
    return float64(a) @ float64(b)


def pack_matrix(b: ArrayLike, *, dtype: DTypeLike | None = None) -> Array:
    """The matrix b itself, in float64 whatever ``dtype``: packing changes its place in memory alone."""
    return float64(b)
