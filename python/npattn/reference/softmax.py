"""softmax, log_softmax, logsumexp in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._common import Array, float64, ieee


@ieee
def softmax(
    x: ArrayLike, axis: int = -1, *, mask: ArrayLike | None = None, sinks: ArrayLike | None = None
) -> Array:
    """y_j = exp(x_j - m) / (sum_k exp(x_k - m) + exp(sink - m)), m = max of all; k over mask == True.

    x (..., n, ...) -> y of the same shape. mask: bool, True = keep, broadcasts to x. sinks: one more logit a
    slice, in the denominator only, broadcasts to x without ``axis``. A slice that keeps nothing is zeros;
    a NaN or +inf that is kept makes what is kept NaN, what is not kept stays 0.
    """
    scores = np.moveaxis(float64(x), axis, -1)
    keep = np.moveaxis(np.broadcast_to(True if mask is None else np.asarray(mask), np.shape(x)), axis, -1)
    sink = np.broadcast_to(-np.inf if sinks is None else float64(sinks), scores.shape[:-1])[..., None]
    scores = np.where(keep, scores, -np.inf)
    maximum = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    maximum = np.where(maximum == -np.inf, 0.0, maximum)  # nothing to see: exp(-inf - 0) is 0, not NaN
    exponential = np.exp(scores - maximum)
    total = exponential.sum(-1, keepdims=True) + np.exp(sink - maximum)
    weights = np.where(keep, exponential / np.where(total == 0.0, 1.0, total), 0.0)
    return np.moveaxis(weights, -1, axis)


@ieee
def logsumexp(x: ArrayLike, axis: int = -1, *, keepdims: bool = False) -> Array:
    """m + log(sum_j exp(x_j - m)), m = max_j x_j. An empty or all -inf slice is -inf, +inf is +inf."""
    scores = np.moveaxis(float64(x), axis, -1)
    maximum = finite_maximum(scores)
    total = maximum + np.log(np.exp(scores - maximum).sum(-1, keepdims=True))
    return np.moveaxis(total, -1, axis) if keepdims else total[..., 0]


@ieee
def log_softmax(x: ArrayLike, axis: int = -1) -> Array:
    """(x_j - m) - log(sum_k exp(x_k - m)). A slice of -inf is -inf throughout; +inf gives NaN at itself and
    -inf elsewhere.
    """
    scores = np.moveaxis(float64(x), axis, -1)
    shifted = scores - finite_maximum(scores)
    total = logsumexp(shifted, keepdims=True)
    return np.moveaxis(np.where(total == -np.inf, -np.inf, shifted - total), -1, axis)


def finite_maximum(scores: Array) -> Array:
    """max_j x_j over the last axis, kept; 0 where it is not finite, so that x - m is never -inf + inf."""
    maximum = scores.max(-1, keepdims=True, initial=-np.inf)
    return np.where(np.isfinite(maximum), maximum, 0.0)
