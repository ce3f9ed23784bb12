"""Where a kernel writes: into the caller's array where it can, else into one that is then copied there."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def same_elements(a: Array, b: Array) -> bool:
    """True if element i of both lies at the same address, for every i."""
    return a is b or (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.strides == b.strides
        and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
    )


def kernel_output(out: Array, dtype: np.dtype[Any], x: Array, *others: Array | None) -> Array:
    """`out` itself if a kernel that computes in `dtype` may write it while it reads the inputs, else a new array.

    A kernel may write over `x` where both are the same elements, never over `others`.
    """
    inputs = others if same_elements(out, x) else (x, *others)
    overlaps = any(array is not None and np.may_share_memory(out, array) for array in inputs)
    if out.dtype == dtype and out.dtype.isnative and not overlaps:
        return out
    return np.empty(out.shape, dtype)


def deliver(computed: Array, out: Array) -> Array:
    """`out`, holding what was computed, rounded to its dtype."""
    if computed is not out:
        with np.errstate(all="ignore"):  # beyond the largest float16 is inf, as in the kernels
            out[...] = computed
    return out
