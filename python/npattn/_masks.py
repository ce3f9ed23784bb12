"""Masks, biases, positions and lengths: checked, and brought to the shapes and dtypes that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn._check import as_array, as_flag, as_integer, conversion, plain_array

UNBOUNDED = np.iinfo(np.int64).max
_FAR = 2**60  # positions and windows beyond it behave as at it; sums of two stay in int64

Array = np.ndarray[Any, Any]
Masks = tuple[Array | None, Array | None, Array | None]  # bool, float, bias


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call, after broadcasting: scores are (*leading, heads, query_len, key_len)."""

    leading: tuple[int, ...]
    heads: int
    query_len: int
    key_len: int

    @property
    def scores(self) -> tuple[int, ...]:
        return (*self.leading, self.heads, self.query_len, self.key_len)


def split_masks(attn_mask: Any, bias: Any, sizes: Sizes, dtype: np.dtype[Any]) -> Masks:
    """The bool mask, the float mask and the bias, each broadcast (as a view) to the scores, or None."""
    visible = addend = None
    if attn_mask is not None:
        mask = attn_mask if isinstance(attn_mask, np.ma.MaskedArray) else plain_array("attn_mask", attn_mask)
        if mask.dtype.kind in "iu":
            raise TypeError(
                f"attn_mask has integer dtype {mask.dtype}: convert it to bool (True = attend) with "
                f"{conversion('attn_mask', attn_mask, 'bool')}, or to float, to add it to the scores"
            )
        if mask.dtype == bool and type(mask) is np.ndarray:
            visible = _broadcast("attn_mask", mask, sizes)
        else:
            addend = _addend("attn_mask", attn_mask, sizes, dtype)
    if bias is not None:
        bias_dtype = plain_array("bias", bias).dtype
        if bias_dtype.kind in "biu":
            raise TypeError(
                f"bias has dtype {bias_dtype}; it is added to the scores and must be float: "
                "pass a bool mask as attn_mask, convert integers with "
                + conversion("bias", bias, "np.float32")
            )
        bias = _addend("bias", bias, sizes, dtype)
    return visible, addend, bias


def _addend(name: str, value: Any, sizes: Sizes, dtype: np.dtype[Any]) -> Array:
    array = as_array(name, value)
    if array.dtype != dtype:
        # Convert what memory holds, not what a stride of 0 repeats.
        small = array[tuple(slice(1) if stride == 0 else slice(None) for stride in array.strides)]
        array = np.broadcast_to(_in_dtype(small, dtype), array.shape)
    return _broadcast(name, array, sizes)


def _in_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    """`array` in another dtype; finite numbers stay finite."""
    if array.dtype == dtype:
        return array
    if array.dtype.itemsize > dtype.itemsize:
        limit = np.finfo(dtype).max
        array = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def _broadcast(name: str, array: Array, sizes: Sizes) -> Array:
    try:
        return np.broadcast_to(array, sizes.scores)
    except ValueError:
        pass
    message = (
        f"{name} has shape {array.shape}, which does not broadcast to the scores "
        f"(..., heads, queries, keys) = {sizes.scores}"
    )
    if array.ndim == 2 and len(sizes.leading) >= 1 and array.shape == (sizes.leading[-1], sizes.key_len):
        message += f"; for one row of keys a batch element, (batch, keys), pass {name}[:, None, None, :]"
    elif array.ndim == 3 and len(sizes.leading) == 1 and array.shape[0] == sizes.leading[0] * sizes.heads:
        reshaped = f"{name}.reshape({sizes.leading[0]}, {sizes.heads}, *{name}.shape[1:])"
        message += f"; for (batch * heads, queries, keys) pass {reshaped}"
    raise ValueError(message)


def parse_window(window: Any) -> tuple[int, int]:
    """(left, right) with UNBOUNDED for None."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be None or a pair (left, right) of integers or None, got {window!r}")
    sides = []
    for side, name in zip(window, ("left", "right"), strict=True):
        if side is None:
            sides.append(UNBOUNDED)
            continue
        number = as_integer(f"window's {name} side", side)
        if number < 0:
            raise ValueError(f"window's {name} side must be None or at least 0, got {number}")
        sides.append(number if number < _FAR else UNBOUNDED)
    return sides[0], sides[1]


def integers(name: str, value: Any, shape: tuple[int, ...], what: str) -> Array:
    """`value` as int64 of this shape, C-contiguous, from -2**60 to 2**60; floats and bool are a TypeError."""
    array = as_array(name, value, any_dtype=True)
    if array.dtype.kind in "fO" and not isinstance(value, np.ndarray):
        exact = np.asarray(value, dtype=object)  # Python's integers have no limit, those of NumPy have
        if exact.size and all(type(number) is int for number in exact.flat):
            array = np.asarray(np.clip(exact, -_FAR, _FAR), np.int64)
    empty_list = isinstance(value, (list, tuple)) and array.size == 0
    if array.dtype.kind not in "iu" and not empty_list:
        raise TypeError(f"{name} must be integers, got {value!r} (dtype {array.dtype})")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        array = np.minimum(array, np.uint64(_FAR))
    numbers = np.empty(shape, np.int64)
    try:
        numbers[...] = np.broadcast_to(array, shape) if array.ndim > len(shape) else array
    except ValueError:
        message = f"{name} has shape {array.shape}, which does not broadcast to {what} {shape}"
        raise ValueError(message) from None
    np.maximum(numbers, -_FAR, out=numbers)
    return np.minimum(numbers, _FAR, out=numbers)


def shown(number: Any) -> str:
    """One of `integers`, for a message."""
    return str(number) if abs(number) < _FAR else "2**60 or more" if number > 0 else "-2**60 or less"


def parse_offset(query_offset: Any, sizes: Sizes, needed_by: str | None) -> Array | None:
    """The query offset of every leading index, or None for 0. `needed_by`: what asks where queries stand."""
    if query_offset is not None:
        return integers("query_offset", query_offset, sizes.leading, "the leading axes")
    if needed_by is not None and sizes.query_len != sizes.key_len:
        raise ValueError(
            f"{needed_by} with {sizes.query_len} queries and {sizes.key_len} keys needs query_offset, the "
            "place of the first query on the key axis. The usual choices: query_offset=0 (upper left: torch, "
            f"ONNX without a cache) or query_offset={sizes.key_len - sizes.query_len} = keys - queries "
            "(lower right: flash-attention, a cache)"
        )
    return None


def parse_lengths(kv_lengths: Any, sizes: Sizes) -> Array | None:
    """The number of keys of every leading index, or None for all."""
    if kv_lengths is None:
        return None
    lengths = integers("kv_lengths", kv_lengths, sizes.leading, "the leading axes")
    if lengths.size and (lengths.min() < 0 or lengths.max() > sizes.key_len):
        bad = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueError(f"kv_lengths must lie in 0..{sizes.key_len} (the number of keys), got {shown(bad)}")
    return lengths


def parse_sinks(sinks: Any, sizes: Sizes, dtype: np.dtype[Any]) -> Array | None:
    """One sink logit a query head, or None."""
    if sinks is None:
        return None
    array = as_array("sinks", sinks)
    if array.shape != (sizes.heads,):
        raise ValueError(
            f"sinks has shape {array.shape}; expected one logit for each of the {sizes.heads} query heads: "
            f"({sizes.heads},)"
        )
    return np.ascontiguousarray(_in_dtype(array, dtype))


def parse_slopes(alibi_slopes: Any, sizes: Sizes, dtype: np.dtype[Any]) -> Array | None:
    """One ALiBi slope a query head and leading index, or None."""
    if alibi_slopes is None:
        return None
    array = np.ascontiguousarray(_in_dtype(as_array("alibi_slopes", alibi_slopes), dtype))
    if array.ndim == 0 or array.shape[-1] != sizes.heads:
        raise ValueError(
            f"alibi_slopes has shape {array.shape}; expected (heads,) or (..., heads) with {sizes.heads} "
            "query heads"
        )
    try:
        return np.broadcast_to(array, (*sizes.leading, sizes.heads))
    except ValueError:
        raise ValueError(
            f"alibi_slopes has shape {array.shape}, which does not broadcast to (..., heads) = "
            f"{(*sizes.leading, sizes.heads)}"
        ) from None


@dataclass(frozen=True)
class Options:
    """Everything about a call but its queries, keys and values, in the form that `_core.attention` takes."""

    masks: Masks
    sinks: Array | None
    slopes: Array | None
    offset: Array | None
    lengths: Array | None
    is_causal: bool
    left: int
    right: int


def resolve(
    sizes: Sizes,
    dtype: np.dtype[Any],
    *,
    attn_mask: Any,
    bias: Any,
    is_causal: Any,
    query_offset: Any,
    window: Any,
    kv_lengths: Any,
    sinks: Any,
    alibi_slopes: Any,
) -> Options:
    """All options checked against the sizes of the call; floats in the dtype computed in."""
    causal = as_flag("is_causal", is_causal)
    left, right = parse_window(window)
    askers = {
        "is_causal=True": causal,
        "window": left != UNBOUNDED or right != UNBOUNDED,
        "alibi_slopes": alibi_slopes is not None,
    }
    needed_by = next((option for option, asks in askers.items() if asks), None)
    return Options(
        split_masks(attn_mask, bias, sizes, dtype),
        parse_sinks(sinks, sizes, dtype),
        parse_slopes(alibi_slopes, sizes, dtype),
        parse_offset(query_offset, sizes, needed_by),
        parse_lengths(kv_lengths, sizes),
        causal,
        left,
        right,
    )
