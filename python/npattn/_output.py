"""What a kernel reads and where it writes: the caller's arrays where it can, else copies of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._check import FLOAT32, FLOAT64, is_bfloat16, writes_directly
from ._threads import _core, current

Array = np.ndarray[Any, Any]


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """`array` in the dtype that is computed in."""
    return array if array.dtype is dtype else array.astype(dtype, copy=False)


def stored(array: Array) -> Array:
    """`array` as the kernels that take half types want it: bfloat16 as its bits, in uint16."""
    return array.view(np.uint16) if is_bfloat16(array.dtype) else array


def kernel_output(out: Array | None, dtype: np.dtype[Any], x: Array, *others: Array | None) -> Array:
    """`out` if a kernel whose results are `dtype` may write it while it reads its inputs, else a new array.

    A kernel may write over `x` where both are the same elements, never over `others`.
    """
    if out is None:
        return np.empty_like(x, dtype)
    overlaps = np.may_share_memory(out, x) and not _same_elements(out, x)
    overlaps = overlaps or any(array is not None and np.may_share_memory(out, array) for array in others)
    return out if out.dtype == dtype and not overlaps else np.empty_like(x, dtype)


def result_array(
    out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], *inputs: Array | None
) -> Array:
    """`out` if a kernel that computes in `dtype` may write it and no input lies there, else a new array."""
    return out if out is not None and writes_directly(out, dtype, *inputs) else np.empty(shape, dtype)


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """The caller's numbers in another dtype; finite ones beyond its range become inf with NumPy's warning."""
    if array.dtype == dtype or dtype in (FLOAT32, FLOAT64):
        return array.astype(dtype, copy=False)
    result = rounded(array, dtype)
    if (np.isinf(result) & np.isfinite(array)).any():
        warn_of_overflow()
    return result


def warn_of_overflow() -> None:
    """What NumPy says, under the caller's np.errstate, when a number overflows in a cast."""
    np.array(1e300).astype(FLOAT32)


def rounded(computed: Array, dtype: np.dtype[Any]) -> Array:
    """`computed` in the dtype of the result; beyond the largest float16 is inf, silently, as in kernels."""
    if computed.dtype is dtype:
        return computed
    if computed.dtype == FLOAT32 and dtype.itemsize == 2:
        result = np.empty_like(computed, dtype, subok=False)
        _core.narrow(computed, stored(result), current())
        return result
    with np.errstate(all="ignore"):
        return computed.astype(dtype, copy=False)


def deliver(computed: Array, out: Array | None, dtype: np.dtype[Any]) -> Array:
    """What was computed, rounded to `dtype`: in `out` where there is one."""
    if out is None:
        return rounded(computed, dtype)
    if computed is not out:
        with np.errstate(all="ignore"):
            out[...] = computed
    return out


def _same_elements(a: Array, b: Array) -> bool:
    """True if element i of both lies at the same address, for every i."""
    if a is b:
        return True
    alike = a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
    return alike and bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
