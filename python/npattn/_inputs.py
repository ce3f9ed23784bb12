"""Query, key and value as the caller has them, brought to what the kernels read; the numbers of a call."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from npattn._check import as_array, as_number, common_dtype, compute_dtype
from npattn._masks import Sizes
from npattn._output import stored

Layout = Literal["BHSD", "BSHD"]
Array = np.ndarray[Any, Any]


def check_layout(layout: Any) -> None:
    """ValueError unless it is one of the two."""
    if layout not in ("BHSD", "BSHD"):
        raise ValueError(f'layout must be "BHSD" or "BSHD", got {layout!r}')


def contiguous_last(array: Array) -> Array:
    """`array`, or a copy of it whose last axis is contiguous."""
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return np.ascontiguousarray(array)
    return array


class Inputs:
    """Query, key and value as (..., H, L, E) views with common leading axes, in dtypes that the kernels read.

    These are the dtype computed in and the half types, bfloat16 as its bits; key and value have the same.
    """

    def __init__(self, query: Any, key: Any, *value: Any, layout: str) -> None:
        check_layout(layout)
        arrays = {"query": as_array("query", query), "key": as_array("key", key)}
        if value:  # without one, the values are of width 0
            arrays["value"] = as_array("value", value[0])
        for name, array in arrays.items():
            if array.ndim < 2:
                expected = "(..., heads, length, width) or (length, width)"
                raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
        self.dtype = common_dtype(**arrays)
        self.compute = compute_dtype(self.dtype)
        self.originals = tuple(arrays.values())
        self.single_head = all(array.ndim == 2 for array in arrays.values())
        self.swap = layout == "BSHD"
        q, k, *values = map(self.heads_first, self.originals)
        v = values[0] if values else k[..., :0]
        self._check(q, k, v)
        leading = q.shape[:-3]
        keys_differ = k.dtype != v.dtype
        q, k, v = (self._readable(x, x is not q and keys_differ) for x in (q, k, v))
        if k.shape[:-3] != leading or v.shape[:-3] != leading:
            try:
                leading = np.broadcast_shapes(leading, k.shape[:-3], v.shape[:-3])
            except ValueError:
                raise ValueError(f"the leading (batch) axes do not broadcast: {self._shapes()}") from None
            q, k, v = (np.broadcast_to(x, (*leading, *x.shape[-3:])) for x in (q, k, v))
        self.sizes = Sizes(leading, q.shape[-3], q.shape[-2], k.shape[-2])
        self.head_dim = q.shape[-1]
        self.query, self.key, self.value = q, k, v

    def _readable(self, array: Array, convert: bool) -> Array:
        """`array` with a contiguous last axis and in a dtype that the kernels read."""
        if array.dtype != self.compute and (convert or self.compute.itemsize == 8):
            with np.errstate(all="ignore"):  # hidden keys may hold anything
                array = array.astype(self.compute)
        return stored(contiguous_last(array))

    def heads_first(self, array: Array) -> Array:
        """(L, E) -> (1, L, E); with layout BSHD, (..., L, H, E) -> (..., H, L, E)."""
        if array.ndim == 2:
            return array[None]
        return array.swapaxes(-2, -3) if self.swap else array

    def _shapes(self) -> str:
        names = ("query", "key", "value")
        return ", ".join(f"{name} {array.shape}" for name, array in zip(names, self.originals, strict=False))

    def _check(self, q: Array, k: Array, v: Array) -> None:
        heads, length, width = k.shape[-3:]
        if q.shape[-1] != width:
            raise ValueError(f"query and key differ in head_dim, {q.shape[-1]} and {width}: {self._shapes()}")
        if width == 0:
            raise ValueError(f"head_dim is 0: nothing to multiply and no default scale ({self._shapes()})")
        if length != v.shape[-2]:
            raise ValueError(f"key and value differ in length, {length} and {v.shape[-2]}: {self._shapes()}")
        if heads != v.shape[-3]:
            raise ValueError(f"key and value differ in heads, {heads} and {v.shape[-3]}: {self._shapes()}")
        query_heads = q.shape[-3]
        if query_heads != heads and (heads == 0 or query_heads % heads != 0):
            raise ValueError(
                f"{query_heads} query heads are not a multiple of {heads} key heads: {self._shapes()}"
            )

    def restore(self, array: Array) -> Array:
        """A result (..., H, L, ...), alike in both layouts, as the caller sees it: less the only head."""
        return array.squeeze(0) if self.single_head else array


def check_representable(name: str, number: float, dtype: np.dtype[Any]) -> None:
    """ValueError for a number that is infinite, or 0 and not so given, in the dtype computed in."""
    with np.errstate(all="ignore"):
        held = dtype.type(number)
    if not np.isfinite(held) or (held == 0.0) != (number == 0.0):
        raise ValueError(f"{name} must be representable in {dtype}, which is computed in; got {number}")


def parse_scale(scale: Any, head_dim: int, dtype: np.dtype[Any]) -> float:
    """The factor of the scores, 1 / sqrt(head_dim) by default; `dtype` is what is computed in."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = as_number("scale", scale)
    check_representable("scale", number, dtype)
    return number


def parse_softcap(softcap: Any, dtype: np.dtype[Any]) -> float:
    """The cap of the scores, 0 for none."""
    if softcap is None:
        return 0.0
    cap = as_number("softcap", softcap)
    if cap < 0:
        raise ValueError(f"softcap must be None, 0 (off) or positive, got {cap}")
    check_representable("softcap", cap, dtype)
    return cap
