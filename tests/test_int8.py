"""Weights of 8 bits: the integers of every instruction set are those of the formula, the error is bounded."""

from __future__ import annotations

import pickle
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn._matmul import linear
from npattn.reference.matmul import quantized
from shapes import Array, layouts_of, reversed_axes
from support import DTYPES, assert_same_bits, each_isa
from tolerances import unit

pytestmark = pytest.mark.usefixtures("isa")

# Few rows, tiles and tasks; depths at and beside quads and blocks of 1024; columns at and beside panels.
SHAPES = [(1, 1, 1), (3, 7, 31), (5, 0, 4), (12, 64, 32), (13, 1023, 33), (97, 1025, 70), (40, 2500, 300)]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def integers(x: Array, axis: int) -> tuple[Array, Array]:
    """(q, scale) in float32, as the kernels compute them."""
    largest = np.abs(x).max(axis=axis, keepdims=True, initial=0)
    inverse = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    return np.rint(x * inverse).astype(np.int64), largest / np.float32(127)


def in_float32(a: Array, b: Array) -> Array:
    """The product by the formula, the sums exact, then in float32 what the kernels do."""
    (rows, row_scale), (columns, column_scale) = integers(a, 1), integers(b, 0)
    return (rows @ columns).astype(np.float32) * row_scale * column_scale


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_bit_is_that_of_the_formula(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    a, b = normal(rows, depth), normal(depth, columns, seed=1)
    packed = npattn.pack_matrix(b, dtype=np.int8)
    result = npattn.matmul(a, packed)
    assert_same_bits(result, in_float32(a, b))
    for threads in (1, 2, 3):
        with npattn.threads(threads):
            assert_same_bits(npattn.matmul(a, packed), result)
    assert_same_bits(npattn.matmul(np.stack([a, a]), packed)[1], result)
    assert_same_bits(npattn.matmul(a[-1:], packed), result[-1:])
    for _ in each_isa():  # packed under one instruction set, multiplied under another
        assert_same_bits(npattn.matmul(a, packed), result)


def test_extremes_of_the_integers() -> None:
    depth = 65_536  # the sums come within 1 % of 2^31
    a, b = np.ones((2, depth), np.float32), np.ones((depth, 33), np.float32)
    a[1] = -1
    result = npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8))
    np.testing.assert_allclose(result, np.outer([depth, -depth], np.ones(33)), rtol=1e-6)
    b[:, 1] = -1
    assert_same_bits(npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8)), in_float32(a, b))


@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy tails", "offset"])
def test_error_is_within_its_bound(kind: str) -> None:
    rng = np.random.default_rng(5)
    draw = {
        "normal": rng.standard_normal,
        "uniform": rng.random,
        "heavy tails": lambda shape: rng.standard_t(2, shape),
        "offset": lambda shape: rng.standard_normal(shape) + 10,
    }[kind]
    a, b = draw((50, 700)).astype(np.float32), draw((700, 90)).astype(np.float32)
    exact = reference.matmul(a, b)
    error = np.abs(npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8)) - exact)
    row, column = np.abs(a).max(1, keepdims=True), np.abs(b).max(0, keepdims=True)
    bound = np.abs(a).sum(1, keepdims=True) * column + np.abs(b).sum(0, keepdims=True) * row
    assert (error <= bound / 254 + 700 * row * column / 64516 + 1e-6 * np.abs(exact)).all()
    if kind == "normal":
        assert np.linalg.norm(error) < 0.012 * np.linalg.norm(exact)


def test_reference_is_the_formula() -> None:
    a, b = normal(7, 40), normal(40, 9, seed=1)
    (rows, row_scale), (columns, column_scale) = quantized(a, 1), quantized(b, 0)
    expected = (rows @ columns) * row_scale * column_scale
    packed = npattn.pack_matrix(b, dtype=np.int8)
    np.testing.assert_allclose(npattn.matmul(a, packed), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(packed), reference.pack_matrix(b, dtype=np.int8), rtol=1e-6)
    assert np.array_equal(quantized(np.zeros((2, 3)), 1)[0], np.zeros((2, 3)))
    assert np.isnan(quantized([[1.0, np.inf]], 1)[1]).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_result_has_the_dtype_of_the_rows(dtype: np.dtype[Any]) -> None:
    a, b = normal(9, 64, dtype=dtype), normal(64, 40, seed=1)
    packed = npattn.pack_matrix(b, dtype=np.int8)
    single = npattn.matmul(a.astype(np.float32), packed)
    result = npattn.matmul(a, packed)
    assert_same_bits(result, single.astype(dtype))
    assert_same_bits(npattn.matmul(a, packed, dtype=np.float32), single)
    out = np.zeros((9, 80), dtype)[:, ::2]
    assert npattn.matmul(a, packed, out=out) is out
    assert_same_bits(out, result)
    if dtype != np.float64:
        bias = normal(40, seed=2)
        expected = single + bias
        np.testing.assert_allclose(
            linear(a, packed, bias), expected, rtol=4 * unit(dtype), atol=4 * unit(dtype)
        )


def test_layouts() -> None:
    a, b = normal(20, 70), normal(70, 40, seed=1)
    packed = npattn.pack_matrix(b, dtype=np.int8)
    expected = npattn.matmul(a, packed)
    for name, view in layouts_of(a):
        assert np.array_equal(npattn.matmul(view, packed), expected), name
    for name, view in layouts_of(b):
        assert np.array_equal(npattn.matmul(a, npattn.pack_matrix(view, dtype=np.int8)), expected), name
    assert_same_bits(npattn.matmul(a[3], packed), expected[3])
    stacked = np.stack([a, -a])
    assert_same_bits(npattn.matmul(reversed_axes(stacked)[::-1], packed)[1], npattn.matmul(a, packed))


def test_packed() -> None:
    b = normal(41, 33)
    packed = npattn.pack_matrix(b, dtype=np.int8)
    assert packed.dtype == np.int8
    assert packed.shape == (41, 33)
    assert packed.nbytes == 44 * 64 + 33 * 4
    assert repr(packed) == "PackedMatrix(shape=(41, 33), dtype=int8)"
    held = np.asarray(packed)
    assert held.dtype == np.float32
    q, scale = integers(b, 0)
    assert_same_bits(held, q.astype(np.float32) * scale)
    assert np.abs(held - b).max() <= 0.501 * scale.max()
    assert_same_bits(np.asarray(pickle.loads(pickle.dumps(packed))), held)
    assert_same_bits(np.asarray(npattn.pack_matrix(b.astype(np.float64), dtype="int8")), held)
    kept = b.copy()
    b[:] = 0
    assert_same_bits(np.asarray(packed), held)
    assert np.abs(np.asarray(npattn.pack_matrix(packed)) - kept).max() <= 0.501 * scale.max()


def test_rows_and_columns_that_are_zero_tiny_huge_or_not_finite() -> None:
    a, b = normal(6, 50), normal(50, 40, seed=1)
    b[:, 3] = 0
    b[:, 4] *= np.float32(1e-42)
    b[:, 5] *= np.float32(1e37)
    packed = npattn.pack_matrix(b, dtype=np.int8)
    clean = npattn.matmul(a, packed)
    assert (clean[:, 3] == 0).all()
    np.testing.assert_allclose(clean[:, 5], reference.matmul(a, b)[:, 5], rtol=0.1, atol=2e36)
    a[1], a[2] = 0, a[2] * np.float32(1e-42)
    a[3] *= np.float32(1e30)
    a[4, 7], a[5, 8] = np.nan, np.inf
    result = npattn.matmul(a, packed)
    assert (result[1] == 0).all()
    others = [0, 1, 2, 6, 7]
    np.testing.assert_allclose(result[2, others], reference.matmul(a, b)[2, others], rtol=0.2, atol=3e-43)
    np.testing.assert_allclose(result[3, others], reference.matmul(a, b)[3, others], rtol=0.1, atol=1e30)
    assert np.isnan(result[4:]).all()
    assert_same_bits(result[0], clean[0])


def test_large_rows_of_small_columns(isa: str) -> None:
    """The sum times one of the scales is beyond float32, times both it is not."""
    a, b = normal(9, 50), normal(50, 40, seed=1)
    expected = npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8))
    large, small = a * np.float32(2.0**120), b * np.float32(2.0**-110)
    result = npattn.matmul(large, npattn.pack_matrix(small, dtype=np.int8))
    assert_same_bits(result, expected * np.float32(2.0**10))
    result = npattn.matmul(small.T, npattn.pack_matrix(large.T, dtype=np.int8))
    assert np.abs(result - expected.T * 2.0**10).max() < 0.02 * np.abs(result).max()


def test_errors() -> None:
    b = normal(4, 3)
    b[1, 2], b[0, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"b has 2 elements that are not finite"):
        npattn.pack_matrix(b, dtype=np.int8)
    with pytest.raises(ValueError, match=r"b has shape \(65537, 1\); int8 takes at most 65536 rows"):
        npattn.pack_matrix(np.ones((65_537, 1)), dtype=np.int8)
    packed = npattn.pack_matrix(normal(4, 3), dtype=np.int8)
    with pytest.raises(ValueError, match="another number of rows"):
        npattn.matmul(np.ones((2, 3), np.float32), packed)
    with pytest.raises(TypeError, match="out has dtype float64"):
        npattn.matmul(np.ones((2, 4), np.float32), packed, out=np.empty((2, 3)))
