"""Splitting an embedding into heads, and putting the heads back side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _threads
from ._check import as_array, as_integer, check_out
from ._core import copy as _copy

Array = NDArray[Any]


def split_heads(x: ArrayLike, num_heads: int, *, copy: bool = False, out: Array | None = None) -> Array:
    """Split the embedding into heads: y[..., h, l, e] = x[..., l, h * E + e].

    Parameters
    ----------
    x : array_like, (..., L, H * E)
        Any dtype; it is kept.
    num_heads : int
        H. It must divide the last axis.
    copy : bool
        False: a view of x, whatever its strides; nothing is copied. True: a new array in C order, copied by
        all threads.
    out : ndarray, (..., H, L, E), optional
        Copy into this array. Exact shape and dtype, any strides; may overlap x.

    Returns
    -------
    ndarray, (..., H, L, E)
        A view of x unless ``copy`` or ``out`` is given.

    Raises
    ------
    ValueError
        If num_heads is below 1 or does not divide the last axis, x has fewer than two axes, or ``out`` has
        another shape or is read-only.
    TypeError
        If num_heads is not an integer, or ``out`` has another dtype.

    Notes
    -----
    Vaswani et al. 2017, Attention Is All You Need, section 3.2.2.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> npattn.split_heads(np.arange(8).reshape(2, 4), 2)
    array([[[0, 1],
            [4, 5]],
    <BLANKLINE>
           [[2, 3],
            [6, 7]]])
    """
    array = _any_array(x)
    num_heads = as_integer("num_heads", num_heads, minimum=1)
    if array.ndim < 2:
        raise ValueError(f"x must have at least two axes, (..., L, H * E); got shape {array.shape}")
    width = array.shape[-1]
    if width % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide the last axis of x, {width}")
    heads = array.reshape(*array.shape[:-1], num_heads, width // num_heads).swapaxes(-2, -3)
    if out is None:
        return copied(heads, np.empty(heads.shape, heads.dtype)) if copy else heads
    copied(heads, check_out(out, heads.shape, heads.dtype))
    return out


def merge_heads(x: ArrayLike, *, out: Array | None = None) -> Array:
    """Put the heads side by side again, the inverse of `split_heads`: y[..., l, h * E + e] = x[..., h, l, e].

    Parameters
    ----------
    x : array_like, (..., H, L, E)
        Any dtype; it is kept.
    out : ndarray, (..., L, H * E), optional
        Where to write. Exact shape and dtype, any strides; may overlap x.

    Returns
    -------
    ndarray, (..., L, H * E)
        A new array in C order, never a view, copied by all threads; or ``out``.

    Raises
    ------
    ValueError
        If x has fewer than three axes, or ``out`` has another shape or is read-only.
    TypeError
        If ``out`` has another dtype.

    Notes
    -----
    Vaswani et al. 2017, Attention Is All You Need, section 3.2.2 (Concat).

    Examples
    --------
    >>> import numpy as np, npattn
    >>> npattn.merge_heads(npattn.split_heads(np.arange(8).reshape(2, 4), 2))
    array([[0, 1, 2, 3],
           [4, 5, 6, 7]])
    """
    array = _any_array(x)
    if array.ndim < 3:
        raise ValueError(f"x must have at least three axes, (..., H, L, E); got shape {array.shape}")
    tokens = array.swapaxes(-2, -3)
    shape = (*tokens.shape[:-2], tokens.shape[-2] * tokens.shape[-1])
    merged = np.empty(shape, array.dtype) if out is None else check_out(out, shape, array.dtype)
    copied(tokens, merged.reshape(tokens.shape))  # splitting an axis is always a view
    return merged


def copied(source: Array, destination: Array) -> Array:
    """`destination`, holding the elements of `source`, by the parallel kernel where it can."""
    plain = not source.dtype.hasobject and source.itemsize in (1, 2, 4, 8, 16)
    if plain and not np.may_share_memory(source, destination):
        _copy(source, destination, _threads.current())
    else:
        np.copyto(destination, source)
    return destination


def _any_array(x: ArrayLike) -> Array:
    """`x` as an array of whatever dtype and byte order."""
    return x if type(x) is np.ndarray else as_array("x", x, any_dtype=True)
