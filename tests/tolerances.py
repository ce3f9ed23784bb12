"""How far from the float64 reference a result may lie: one formula of depth, dtype and magnitude.

u(dtype) is the unit roundoff, half the distance from 1 to the next number. Each of the n additions of a
sum of products is rounded by up to u times the partial sum. Where the partial sums grow evenly to the
magnitude M, the standard deviation of the total is u M sqrt(n) / 3; six of them are allowed, so that
millions of outputs, some of them with like roundings, pass and a lost product does not. The result is
rounded once more to its dtype; the half types accumulate in float32. The rest applies that formula to
scores, weights and outputs in turn.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

UNIT_ROUNDOFF = {
    np.dtype(np.float16): 2.0**-11,
    BFLOAT16: 2.0**-8,
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float64): 2.0**-53,
}

# The dtypes of the package, in the order of their precision.
DTYPES = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))

# Six standard deviations of a third each.
DEVIATIONS = 2.0

# A cache of int8 may round queries, and the weights of a block of keys times the scales of their values, to
# this part of the largest among them: the products are exact then.
INT8_STEP = 1.0 / (127 * 128)

# exp2 and tanh are polynomials of a few roundings, an online softmax rescales its sums: so many u cover them.
ELEMENTARY = 8.0

# For the published cases, relative to max(1, |x|).
CASES = {
    BFLOAT16: 1.6e-2,
    np.dtype(np.float16): 2e-3,
    np.dtype(np.float32): 3e-6,
    np.dtype(np.float64): 1e-12,
}


def unit(dtype: DTypeLike) -> float:
    """The unit roundoff of a dtype."""
    return UNIT_ROUNDOFF[np.dtype(dtype)]


def compute_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype in which sums of this dtype are accumulated."""
    return np.promote_types(np.float32, dtype) if np.dtype(dtype) != BFLOAT16 else np.dtype(np.float32)


def tolerance(dtype: DTypeLike, depth: int = 1, magnitude: float = 1.0) -> float:
    """Absolute: a sum of ``depth`` products whose absolute values add up to ``magnitude``."""
    summed = DEVIATIONS * math.sqrt(max(depth, 1)) * unit(compute_dtype(dtype))
    # The result itself may be a subnormal of the dtype: then it is off by half its smallest step.
    return magnitude * (summed + unit(dtype)) + smallest_step(dtype)


def smallest_step(dtype: DTypeLike) -> float:
    """The smallest subnormal of a dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).smallest_subnormal)


def case_tolerance(dtype: DTypeLike, expected: ArrayLike = 0.0) -> float:
    """Absolute: the published tolerance of the cases for numbers as large as ``expected``."""
    return CASES[np.dtype(dtype)] * max(1.0, largest(expected))


def largest(x: ArrayLike) -> float:
    """The largest finite absolute value, 0 where there is none."""
    values = np.abs(np.asarray(x).astype(np.float64))
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))


def longest(x: ArrayLike) -> float:
    """The largest Euclidean norm of a row (last axis), its non-finite elements left out."""
    values = np.asarray(x).astype(np.float64)
    return float(np.sqrt(np.max(np.sum(values**2, axis=-1, where=np.isfinite(values)), initial=0.0)))


def score_tolerance(
    dtype: DTypeLike, query: ArrayLike, key: ArrayLike, *, scale: float | None = None, added: float = 0.0
) -> float:
    """Absolute, in the dtype of accumulation: one score. ``added``: the largest finite |mask + bias + ALiBi|.

    Cauchy and Schwarz bound the sum of the absolute products by |q| |k|.
    """
    depth = np.shape(query)[-1]
    factor = abs(1.0 / math.sqrt(max(depth, 1)) if scale is None else scale)
    magnitude = factor * longest(query) * longest(key)
    compute = compute_dtype(dtype)
    return tolerance(compute, depth, magnitude) + 4.0 * unit(compute) * (magnitude + added)


def weight_tolerance(dtype: DTypeLike, score_error: float) -> float:
    """Relative to the weight, and so absolute for weights up to 1: exp(score error), numerator and sum."""
    return math.expm1(2.0 * score_error) + ELEMENTARY * unit(compute_dtype(dtype)) + unit(dtype)


def attention_tolerance(
    dtype: DTypeLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: float | None = None,
    added: float = 0.0,
) -> float:
    """Absolute: an element of the output, O = sum_j W_j V_j with dO = sum_j W_j ds_j (V_j - O).

    bfloat16 weights are rounded to bfloat16 before they multiply the values.
    """
    score_error = score_tolerance(dtype, query, key, scale=scale, added=added)
    weight_error = math.expm1(score_error) + ELEMENTARY * unit(compute_dtype(dtype))
    weight_error += unit(dtype) if np.dtype(dtype) == BFLOAT16 else 0.0
    return largest(value) * weight_error + tolerance(dtype, np.shape(key)[-2], largest(value))


def int8_score_tolerance(query: ArrayLike, key: ArrayLike, *, scale: float | None = None) -> float:
    """Absolute: a score, off by what a cache of int8 rounds of its query.

    Each element is off by up to half a step, evenly: six standard deviations of a step / sqrt(12).
    """
    depth = np.shape(query)[-1]
    factor = abs(1.0 / math.sqrt(max(depth, 1)) if scale is None else scale)
    return factor * math.sqrt(3) * INT8_STEP * largest(query) * longest(key)


def int8_output_tolerance(value: ArrayLike, largest_weight: float, score_error: float) -> float:
    """Absolute: an element of the output, off by what a cache of int8 rounds of query and weights."""
    rounded = math.sqrt(3 * np.shape(value)[-2]) * INT8_STEP * largest_weight
    return largest(value) * (math.expm1(score_error) + rounded)


def softmax_tolerance(dtype: DTypeLike, length: int, spread: float = 0.0) -> float:
    """Absolute: an element of softmax over ``length`` inputs, up to ``spread`` below their maximum."""
    compute = compute_dtype(dtype)
    return tolerance(dtype, length) + (ELEMENTARY + min(spread, 100.0)) * unit(compute)


def lse_tolerance(dtype: DTypeLike, length: int, score_error: float = 0.0, magnitude: float = 1.0) -> float:
    """Absolute: a log-sum-exp of ``length`` scores that are each off by ``score_error``; it lies near
    ``magnitude``.
    """
    compute = compute_dtype(dtype)
    return score_error + tolerance(compute, length) + ELEMENTARY * unit(compute) * max(1.0, magnitude)
