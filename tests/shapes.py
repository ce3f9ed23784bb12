"""Awkward sizes, and the same values in awkward memory.

Sizes lie at and on either side of where the kernels change what they do. ``LAYOUTS`` are functions from an
array to one of equal shape, dtype and values that lies differently in memory; what surrounds its elements
there is poison (NaN in floats), so that an element read by mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tolerances import BFLOAT16

Array = NDArray[Any]

ROW_TILES = (4, 6, 12)
KEY_PANEL = 32
KEY_BLOCK = 256
# Calls with fewer packed rows (queries x heads of a group) than this do not pack keys and values.
PACKED_ROWS = 16

HEAD_DIMS = (1, 3, 7, 17, 40, 64, 65, 72, 80, 96, 128, 192, 256, 576)
LEADING_AXES = ((), (1,), (3,), (2, 1), (2, 3))
GROUPS = ((1, 1), (4, 4), (4, 2), (6, 2), (5, 1))


def around(*centres: int) -> list[int]:
    """Each size with its two neighbours, sorted, none below 0."""
    return sorted({size for centre in centres for size in (centre - 1, centre, centre + 1) if size >= 0})


QUERY_LENGTHS = tuple(around(0, 4, 6, 12, PACKED_ROWS, 24, 96))
KEY_LENGTHS = tuple(around(0, 8, 16, KEY_PANEL, 2 * KEY_PANEL, KEY_BLOCK, 2 * KEY_BLOCK))

# (query length, key length): every row remainder with a few key lengths, every key length with a few rows.
LENGTHS = tuple(
    sorted(
        {(rows, keys) for rows in QUERY_LENGTHS for keys in (1, KEY_PANEL + 1, KEY_BLOCK + 1)}
        | {(rows, keys) for rows in (1, 5, 17) for keys in KEY_LENGTHS}
    )
)
# The few that a test crosses with much else.
FEW_LENGTHS = ((1, 1), (1, 257), (3, 31), (12, 32), (13, 33), (17, 65), (33, 257), (97, 513))


def poison(dtype: np.dtype[Any]) -> Any:
    """What no result may contain: NaN, or where there is none the largest number, or True."""
    if dtype.kind in "fcV":
        return np.nan
    return True if dtype.kind == "b" else np.iinfo(dtype).max


def contiguous(x: Array) -> Array:
    """In C order."""
    return np.ascontiguousarray(x)


def fortran(x: Array) -> Array:
    """In Fortran order: the last axis has the largest stride."""
    return np.asfortranarray(x)


def swapped_axes(x: Array) -> Array:
    """A (..., H, L, E) view of an array stored as (..., L, H, E)."""
    return x.swapaxes(-2, -3).copy().swapaxes(-2, -3) if x.ndim > 2 else x.T.copy().T


def every_second(x: Array) -> Array:
    """Every second element of a twice as wide array, poison between."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), poison(x.dtype), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def poisoned_border(x: Array) -> Array:
    """A window into a larger array, poison on all sides of it."""
    wide = np.full([size + 2 for size in x.shape], poison(x.dtype), dtype=x.dtype)
    inner = (slice(1, -1),) * x.ndim
    wide[inner] = x
    return wide[inner]


def reversed_axes(x: Array) -> Array:
    """Negative strides on every axis: the reversed view of a reversed copy."""
    back = (slice(None, None, -1),) * x.ndim
    return x[back].copy()[back]


def unaligned(x: Array) -> Array:
    """One byte past an aligned address."""
    buffer = np.zeros(x.nbytes + 1, dtype=np.uint8)
    moved = buffer[1:].view(x.dtype).reshape(x.shape) if x.size else x.copy()
    moved[...] = x
    return moved


def byte_swapped(x: Array) -> Array:
    """In the other byte order."""
    return x.astype(x.dtype.newbyteorder("S"))


def read_only(x: Array) -> Array:
    """Not writeable."""
    copy = x.copy()
    copy.flags.writeable = False
    return copy


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    function.__name__: function
    for function in (
        contiguous,
        fortran,
        swapped_axes,
        every_second,
        poisoned_border,
        reversed_axes,
        unaligned,
        byte_swapped,
        read_only,
    )
}


def layouts_of(x: Array) -> Iterator[tuple[str, Array]]:
    """(name, the values of x in that layout), for every layout that x's dtype and axes allow."""
    for name, function in LAYOUTS.items():
        if function is byte_swapped and (x.dtype == BFLOAT16 or x.dtype.itemsize == 1):
            continue  # neither has another byte order
        if x.ndim < 2 and function in (swapped_axes, fortran):
            continue
        yield name, function(x)


def broadcast(x: Array, axes: Iterable[int] = (0,)) -> Array:
    """Zero strides: the first slice of x along ``axes``, repeated without a copy. Other values than x."""
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))
    return np.broadcast_to(x[first], x.shape)


def pattern(shape: tuple[int, ...], a: int, b: int, dtype: Any = np.float64) -> Array:
    """The filler of the published cases: reproducible anywhere, exact in every floating dtype."""
    i = np.arange(int(np.prod(shape)), dtype=np.int64)
    return ((((a * i * i + b * i + i // 251 + 7) % 251) - 125).reshape(shape) / 128.0).astype(dtype)
