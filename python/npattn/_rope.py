"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _threads
from ._check import FLOAT32, FLOAT64, as_array, as_flag, as_integer, check_out, compute_dtype
from ._core import rotary_embedding as _rotate
from ._inputs import check_layout
from ._output import converted, deliver, kernel_output, stored
from ._positions import rope_cos_sin, token_positions
from ._rope_scaling import DEFAULT_BASE, rope_sections, rotary_width
from ._softmax import broadcasts

Array = NDArray[Any]


def rotary_embedding(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
    layout: str = "BHSD",
    out: Array | None = None,
) -> Array:
    """Turn pairs of elements by given angles: (a, b) -> (a cos - b sin, b cos + a sin).

    Parameters
    ----------
    x : array_like, (..., H, L, E), or (L, E)
        Queries or keys. Its dtype is kept whatever cos and sin have; the half types are computed in float32.
    cos, sin : array_like, (..., L, rotary_dim // 2)
        As from `rope_cos_sin`. They broadcast against x without its head axis: (L, rotary_dim // 2), or
        (batch, L, rotary_dim // 2) for an x with a batch axis; L may be 1. They are converted to the dtype
        that is computed in.
    interleaved : bool
        False: the pairs are (x_i, x_{i + rotary_dim / 2}), as in GPT-NeoX and Hugging Face's Llama. True:
        (x_{2i}, x_{2i + 1}), as in the paper and GPT-J.
    rotary_dim : int, optional
        Turn the first rotary_dim elements only, an even number; 0 leaves x as it is. None is the whole width.
    inverse : bool
        Turn the other way.
    layout : {"BHSD", "BSHD"}
        Where the head axis is: -3, or -2. Without meaning for (L, E).
    out : ndarray, optional
        Where to write: x's shape and the result's dtype, any strides. May overlap the inputs, or be x.

    Returns
    -------
    ndarray
        Of x's shape and dtype; ``out`` if given.

    Raises
    ------
    ValueError
        For an odd, negative or too large rotary_dim, cos and sin that do not fit, an unknown layout, an
        ``out`` that does not fit.
    TypeError
        For dtypes that are not supported.

    Notes
    -----
    Su et al. 2021, RoFormer, section 3.4.2.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> cos, sin = npattn.rope_cos_sin([1], 4, dtype="float64")
    >>> npattn.rotary_embedding(x, cos, sin).round(4)
    array([[-1.9841,  1.9599,  2.4624,  4.0198]])
    >>> npattn.rotary_embedding(x, cos, sin, interleaved=True).round(4)
    array([[-1.1426,  1.9221,  2.9599,  4.0298]])
    """
    array = as_array("x", x)
    by_head = _heads_first("x", array, layout)
    width = _width(array.shape[-1], rotary_dim)
    compute = compute_dtype(array.dtype)
    cos_table = _table("cos", cos, by_head, width, compute)
    sin_table = _table("sin", sin, by_head, width, compute)
    interleaved, inverse = as_flag("interleaved", interleaved), as_flag("inverse", inverse)
    result = None if out is None else check_out(out, array.shape, array.dtype)
    target = kernel_output(result, array.dtype, array, cos_table, sin_table)
    _rotate(
        stored(by_head),
        cos_table,
        sin_table,
        _heads_first("out", stored(target), layout),
        interleaved,
        inverse,
        _threads.current(),
    )
    return deliver(target, result, array.dtype)


def apply_rope(
    query: ArrayLike,
    key: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    scaling: Mapping[str, Any] | None = None,
    sections: Sequence[int] | None = None,
    layout: str = "BHSD",
) -> tuple[Array, Array]:
    """Turn queries and keys to their positions: `rope_cos_sin`, then `rotary_embedding` of both.

    Parameters
    ----------
    query, key : array_like, (..., H, L, E), or (L, E)
        Heads may differ in number; the length must be the same, for there is one ``positions``.
    positions : array_like of int, (L,), or (batch, L); with ``sections`` (S, L) or (S, batch, L)
        Where the tokens stand: np.arange(n) for n tokens, [p] for one.
    base, scaling, sections
        As in `rope_cos_sin`; the length in use is the largest position + 1.
    interleaved, layout
        As in `rotary_embedding`.
    rotary_dim : int, optional
        As in `rotary_embedding`; by default the ``partial_rotary_factor`` of ``scaling``, or the whole width.

    Returns
    -------
    query, key : ndarray
        New arrays of the shapes and dtypes of the inputs.

    Raises
    ------
    TypeError
        For positions that are not integers, or a single integer.
    ValueError
        For lengths or positions that do not fit, and for what `rope_cos_sin` and `rotary_embedding` refuse.

    Notes
    -----
    Su et al. 2021, RoFormer, section 3.2.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> query, key = np.ones((2, 8, 3, 64)), np.ones((2, 2, 3, 64))
    >>> query, key = npattn.apply_rope(query, key, np.arange(3))
    >>> (query[0, 0] @ key[0, 0].T).round(3)  # depends on the distance alone
    array([[64.   , 61.834, 56.608],
           [61.834, 64.   , 61.834],
           [56.608, 61.834, 64.   ]])
    """
    arrays = {"query": as_array("query", query), "key": as_array("key", key)}
    by_head = {name: _heads_first(name, array, layout) for name, array in arrays.items()}
    places = token_positions(positions, allow_length=False)
    (length, head_dim), (key_length, key_dim) = (array.shape[-2:] for array in by_head.values())
    if length != key_length:
        raise ValueError(
            f"query has {length} tokens and key {key_length}, but there is one positions for both; "
            "call rotary_embedding twice"
        )
    if head_dim != key_dim:
        raise ValueError(f"query has head_dim {head_dim} and key {key_dim}; expected the same")
    sections = rope_sections(sections, scaling)
    for name, array in by_head.items():
        check_places(places.shape[0 if sections is None else 1 :], name, _tokens(array))
    width = _width(head_dim, rotary_width(head_dim, rotary_dim, scaling))
    if width == 0:
        return arrays["query"].copy(), arrays["key"].copy()
    table_dtype = FLOAT64 if any(array.dtype == FLOAT64 for array in arrays.values()) else FLOAT32
    cos, sin = rope_cos_sin(places, width, base=base, scaling=scaling, sections=sections, dtype=table_dtype)
    turned_query, turned_key = (
        rotary_embedding(array, cos, sin, interleaved=interleaved, rotary_dim=width, layout=layout)
        for array in arrays.values()
    )
    return turned_query, turned_key


def _heads_first(name: str, array: Array, layout: str) -> Array:
    """(..., H, L, E) whatever the layout; (L, E) as it is."""
    check_layout(layout)
    if array.ndim < 2:
        raise ValueError(f"{name} must have at least two axes, (..., L, E); got shape {array.shape}")
    return array.swapaxes(-2, -3) if layout == "BSHD" and array.ndim > 2 else array


def _tokens(x: Array) -> tuple[int, ...]:
    """The shape of (..., H, L, E) without heads and elements; of (L, E) the L."""
    return x.shape[:-3] + x.shape[-2:-1]


def check_places(shape: tuple[int, ...], name: str, tokens: tuple[int, ...]) -> None:
    """Positions of this shape, sections left out, must say where all tokens of an array stand."""
    if not broadcasts(shape, tokens):
        expected = " or ".join(map(str, dict.fromkeys((tokens[-1:], tokens))))
        raise ValueError(f"positions of shape {shape} do not fit the tokens of {name}; expected {expected}")


def _width(head_dim: int, rotary_dim: int | None) -> int:
    """How many elements of a row are turned."""
    width = head_dim if rotary_dim is None else as_integer("rotary_dim", rotary_dim)
    if width % 2 or not 0 <= width <= head_dim:
        raise ValueError(
            f"rotary_dim must be an even number from 0 to {head_dim}, the width of a head; got {width}"
        )
    return width


def _table(name: str, given: ArrayLike, x: Array, width: int, compute: np.dtype[Any]) -> Array:
    """cos or sin as the kernel reads it: in the dtype computed in, its last axis contiguous."""
    table = as_array(name, given)
    tokens = _tokens(x)
    if table.ndim == 0 or table.shape[-1] != width // 2:
        raise ValueError(
            f"{name} has shape {table.shape}; expected (..., L, {width // 2}), "
            f"half of the {width} elements that turn"
        )
    if not broadcasts(table.shape[:-1], tokens):
        raise ValueError(
            f"{name} of shape {table.shape} does not broadcast to {(*tokens, width // 2)}, "
            f"x of shape {x.shape} (heads first) without its head axis"
        )
    table = converted(table, compute)
    contiguous = table.shape[-1] <= 1 or table.strides[-1] == table.itemsize
    return table if contiguous else np.ascontiguousarray(table)
