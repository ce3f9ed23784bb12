"""softmax, its logarithm, and the logarithm of the sum of exponentials."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _threads
from ._check import as_array, as_integer, check_out, compute_dtype, conversion
from ._core import log_softmax as _log_softmax
from ._core import logsumexp as _logsumexp
from ._core import softmax as _softmax
from ._output import converted, deliver, kernel_output, stored

Array = NDArray[Any]

AxisError: type[Exception] = getattr(np, "exceptions", np).AxisError  # its place in NumPy 2 and 1


def softmax(
    x: ArrayLike,
    axis: int = -1,
    *,
    mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """exp(x_j) / sum_k exp(x_k) along an axis, computed stably, with hidden elements and attention sinks.

    Parameters
    ----------
    x : array_like, (..., n, ...)
        Floats keep their dtype (the half types are computed in float32), integers and bool become float64.
    axis : int
        The axis that is summed over, of size n.
    mask : array_like of bool, optional
        True = visible. Broadcasts to x. Hidden elements get 0 and influence nothing, whatever they are.
    sinks : array_like, optional
        One more logit for every slice, in the denominator only: with m the largest of the slice and its sink,
        y_j = exp(x_j - m) / (sum_k exp(x_k - m) + exp(sink - m)). Broadcasts to the shape of x without
        ``axis``: the sinks (H,) of `scaled_dot_product_attention` go to scores (..., H, L, K) as
        ``sinks[:, None]``.
    out : ndarray, optional
        Where to write: x's shape and the result's dtype, any strides. May overlap the inputs, or be x.

    Returns
    -------
    ndarray
        Of x's shape and dtype; ``out`` if given.

    Raises
    ------
    AxisError
        If x has no such axis.
    TypeError
        For a mask that is not bool, an axis that is not one integer, a dtype that is not supported.
    ValueError
        For a mask or sinks that do not broadcast, or an ``out`` that does not fit.

    Notes
    -----
    A slice with nothing visible (all hidden, or -inf) is zeros. A visible NaN or +inf makes all that is
    visible in its slice NaN.

    Sinks: Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> npattn.softmax(np.array([0.0, np.log(3.0)])).round(4)
    array([0.25, 0.75])
    >>> npattn.softmax(np.zeros((2, 2)), mask=[[True, False], [False, False]])
    array([[1., 0.],
           [0., 0.]])
    """
    array = as_array("x", x)
    axis = _checked_axis(axis, array.ndim)
    visible = None if mask is None else _visible(mask, array.shape)
    compute = compute_dtype(array.dtype)
    logits = None if sinks is None else converted(_logits(sinks, array.shape, axis), compute)
    result = None if out is None else check_out(out, array.shape, array.dtype)
    target = kernel_output(result, array.dtype, array, visible, logits)
    _softmax(
        _last(stored(array), axis),
        None if visible is None else _last(np.broadcast_to(visible, array.shape), axis),
        None if logits is None else _slices(_broadcast_sinks(logits, array.shape, axis), axis),
        _last(stored(target), axis),
        _threads.current(),
    )
    return deliver(target, result, array.dtype)


def log_softmax(x: ArrayLike, axis: int = -1, *, out: Array | None = None) -> Array:
    """x_j - log(sum_k exp(x_k)) along an axis, computed stably: (x_j - m) - log(sum_k exp(x_k - m)).

    Parameters
    ----------
    x : array_like, (..., n, ...)
        Floats keep their dtype, integers and bool become float64.
    axis : int
        The axis that is summed over.
    out : ndarray, optional
        As in `softmax`.

    Returns
    -------
    ndarray
        Of x's shape and dtype. A slice of -inf is -inf throughout; one with +inf has NaN there and -inf
        elsewhere; one with a NaN is NaN.

    Raises
    ------
    AxisError, TypeError, ValueError
        As in `softmax`.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> npattn.log_softmax(np.array([1000.0, 1000.0])).round(4)
    array([-0.6931, -0.6931])
    """
    array = as_array("x", x)
    axis = _checked_axis(axis, array.ndim)
    result = None if out is None else check_out(out, array.shape, array.dtype)
    target = kernel_output(result, array.dtype, array)
    _log_softmax(_last(stored(array), axis), _last(stored(target), axis), _threads.current())
    return deliver(target, result, array.dtype)


def logsumexp(x: ArrayLike, axis: int = -1, *, keepdims: bool = False) -> Array:
    """log(sum_j exp(x_j)) along an axis, computed stably: m + log(sum_j exp(x_j - m)), m = max_j x_j.

    Parameters
    ----------
    x : array_like, (..., n, ...)
        Floats keep their dtype, integers and bool become float64.
    axis : int
        The axis that is summed over.
    keepdims : bool
        Keep that axis, with size 1.

    Returns
    -------
    ndarray
        Of x's shape without ``axis``, and x's dtype. It is -inf for nothing and for -inf alone, inf for
        a slice with +inf, NaN for one with a NaN.

    Raises
    ------
    AxisError, TypeError
        As in `softmax`.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> npattn.logsumexp(np.log([[1.0, 3.0], [2.0, 2.0]])) / np.log(2)
    array([2., 2.])
    """
    array = as_array("x", x)
    axis = _checked_axis(axis, array.ndim)
    result = np.empty((*array.shape[:axis], 1, *array.shape[axis + 1 :]), array.dtype)
    _logsumexp(_last(stored(array), axis), _slices(stored(result), axis), _threads.current())
    return result if keepdims else result.squeeze(axis)


def _checked_axis(axis: Any, ndim: int) -> int:
    """`axis` counted from 0."""
    number = as_integer("axis", axis)
    if not -ndim <= number < ndim:
        raise AxisError(number, ndim)
    return number % ndim


def _last(array: Array, axis: int) -> Array:
    """`array` with `axis` last. The order of the others is free, as long as all arrays have the same."""
    return array if axis == array.ndim - 1 else array.swapaxes(axis, -1)


def _slices(kept: Array, axis: int) -> Array:
    """An array with size 1 along `axis` without it, its other axes in the order of `_last`; a view."""
    return _last(kept, axis).squeeze(-1)


def _visible(mask: ArrayLike, shape: tuple[int, ...]) -> Array:
    visible = as_array("mask", mask, any_dtype=True)
    if visible.dtype != np.bool_:
        advice = (
            "add it to x"
            if visible.dtype.kind == "f"
            else f"convert it with {conversion('mask', mask, 'bool')}"
        )
        raise TypeError(f"mask has dtype {visible.dtype}; expected bool, True = visible: {advice}")
    if not broadcasts(visible.shape, shape):
        raise ValueError(f"mask of shape {visible.shape} does not broadcast to x of shape {shape}")
    return visible


def _logits(sinks: ArrayLike, shape: tuple[int, ...], axis: int) -> Array:
    """Sinks, which broadcast to x without `axis`."""
    logits = as_array("sinks", sinks)
    without = shape[:axis] + shape[axis + 1 :]
    if not broadcasts(logits.shape, without):
        per_head = logits.ndim == 1 and len(without) >= 2 and logits.size == without[-2]
        raise ValueError(
            f"sinks of shape {logits.shape} do not broadcast to {without}, "
            f"x of shape {shape} without axis {axis}" + "; for one a head pass sinks[:, None]" * per_head
        )
    return logits


def _broadcast_sinks(logits: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Sinks of x's shape with size 1 along `axis`."""
    without = shape[:axis] + shape[axis + 1 :]
    return np.expand_dims(np.broadcast_to(logits, without), axis)


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """True if an array of `shape` can be read as one of shape `target`."""
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )
