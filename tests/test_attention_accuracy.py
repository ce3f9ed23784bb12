"""RMS and maximum error against float64: both at most twice those of plain NumPy in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from shapes import Array
from support import DTYPES, each_isa


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(-1.0, 1.0, shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.clip(rng.standard_t(3, shape), -30.0, 30.0)


def large_offset(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return 10.0 + rng.standard_normal(shape)


INPUTS: list[Callable[[np.random.Generator, tuple[int, ...]], Array]] = [
    normal,
    uniform,
    heavy_tailed,
    large_offset,
]
DRAWS = 4  # the largest error of one draw is one unlucky element: compare the mean of a few
# (heads, query length, key length, head dim): at least 1e4 outputs each
SIZES = {"prefill": (3, 80, 520, 64), "decode": (160, 1, 400, 64), "short": (8, 30, 30, 48)}


def plain_numpy(query: Array, key: Array, value: Array, causal: bool) -> Array:
    """What users write today, in the dtype of the arrays; the half types in float32, rounded at the end."""
    dtype = query.dtype
    compute = dtype if dtype.itemsize >= 4 else np.dtype(np.float32)
    q, k, v = (array.astype(compute) for array in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) / compute.type(np.sqrt(q.shape[-1]))
    if causal:
        places = np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
        scores = np.where(np.arange(k.shape[-2]) <= places, scores, -np.inf).astype(compute)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).astype(dtype)


def errors(actual: Array, exact: Array) -> Array:
    """RMS and largest error."""
    difference = actual.astype(np.float64) - exact
    return np.array([np.sqrt(np.mean(difference**2)), np.abs(difference).max()])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("inputs", INPUTS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_no_worse_than_twice_numpy(dtype: str, inputs: Callable[..., Array], size: str) -> None:
    heads, query_len, key_len, head_dim = SIZES[size]
    shapes = [(heads, query_len, head_dim), (heads, key_len, head_dim), (heads, key_len, head_dim)]
    causal = size == "short"
    ours: dict[str, Array] = {isa: np.zeros(2) for isa in each_isa()}
    numpys = np.zeros(2)
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        arrays = [inputs(rng, shape).astype(DTYPES[dtype]) for shape in shapes]
        exact = exact_attention(arrays, causal, np.longdouble if dtype == "float64" else np.float64)
        assert exact.size >= 10_000
        numpys += errors(plain_numpy(*arrays, causal), exact)
        for isa in each_isa():
            ours[isa] += errors(npattn.scaled_dot_product_attention(*arrays, is_causal=causal), exact)
    for isa, (rms, largest) in ours.items():
        assert rms <= 2 * numpys[0], f"{isa}: RMS error {rms / numpys[0]:.2f} times NumPy's"
        assert largest <= 2 * numpys[1], f"{isa}: largest error {largest / numpys[1]:.2f} times NumPy's"


def exact_attention(arrays: list[Array], causal: bool, dtype: Any) -> Array:
    """The float64 reference; where float64 itself is on trial, the same in long double."""
    if dtype is np.float64:
        return reference.scaled_dot_product_attention(*arrays, is_causal=causal)
    return plain_numpy(*(array.astype(dtype) for array in arrays), causal)


def test_no_digits_are_lost_on_large_scores() -> None:
    """Scores near 1e5 that differ by little: the maximum goes before anything is rounded."""
    rng = np.random.default_rng(5)
    query = np.full((1, 20, 16), 100.0, np.float32)
    key = (100.0 + rng.integers(-8, 9, (1, 300, 16)) / 16).astype(np.float32)  # products exact in float32
    value = rng.standard_normal((1, 300, 8)).astype(np.float32)
    exact = reference.scaled_dot_product_attention(query, key, value, scale=0.125)
    for isa in each_isa():
        for rows in (query, query[:, :1]):
            out = npattn.scaled_dot_product_attention(rows, key, value, scale=0.125)
            _, most = errors(out, exact[:, : rows.shape[1]])
            assert most < 1e-2, f"{isa}: {most}"
