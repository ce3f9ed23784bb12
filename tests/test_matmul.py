"""matmul and PackedMatrix: NumPy's shapes and values, the same bits on every path, awkward memory, errors."""

from __future__ import annotations

import pickle
from itertools import product

import npattn
import numpy as np
import pytest
from npattn import reference
from shapes import Array, broadcast, layouts_of
from support import DTYPES, assert_same_bits, each_isa
from tolerances import tolerance

pytestmark = pytest.mark.usefixtures("isa")

# Rows at and beside the tiles (4, 6, 12) and a task's 96; columns at and beside registers and panels of 32;
# depths at and beside the 256 that are summed at a time.
ROWS = (0, 1, 3, 4, 5, 6, 7, 11, 12, 13, 95, 97)
COLUMNS = (0, 1, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65, 200)
DEPTHS = (0, 1, 8, 255, 256, 257, 600)
SHAPES = (
    *((rows, 40, 33) for rows in ROWS),
    *((13, 40, columns) for columns in COLUMNS),
    *((2, 40, columns) for columns in COLUMNS),
    *((rows, depth, 19) for rows in (2, 13) for depth in DEPTHS),
    (1, 2500, 70),
    (97, 2500, 70),
    (30, 20, 2100),
    (97, 600, 512),  # rows of C that fall on the same sets of the L1 cache
)


def normal(*shape: int, dtype: object = np.float64, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def assert_product(actual: Array, a: Array, b: Array) -> None:
    """Equal to the reference within what a sum of that depth may lose."""
    expected = reference.matmul(a, b)
    assert actual.shape == expected.shape
    magnitude = reference.matmul(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    depth = a.shape[-1]
    allowed = tolerance(actual.dtype, depth, 1.0) * np.maximum(magnitude, 1.0)
    assert np.all(np.abs(actual.astype(np.float64) - expected) <= allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_shapes(shape: tuple[int, int, int], dtype: str) -> None:
    rows, depth, columns = shape
    a, b = normal(rows, depth, dtype=DTYPES[dtype]), normal(depth, columns, dtype=DTYPES[dtype], seed=1)
    result = npattn.matmul(a, b)
    assert result.dtype == a.dtype
    assert_product(result, a, b)
    packed = npattn.matmul(a, npattn.pack_matrix(b))
    assert_product(packed, a, b)
    if columns != 1:  # a single column is contiguous: it is not packed
        assert_same_bits(packed, result)
    assert_product(npattn.matmul(a, np.asfortranarray(b)), a, b)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((5,), (5,)),
        ((5,), (5, 3)),
        ((4, 5), (5,)),
        ((2, 3, 4, 5), (5, 6)),
        ((4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((5,), (2, 5, 6)),
        ((2, 4, 5), (5,)),
        ((0, 4, 5), (5, 6)),
        ((40, 3, 20), (40, 20, 3)),
    ],
)
def test_numpys_shapes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    expected = np.matmul(a, b)
    result = npattn.matmul(a, b)
    assert np.shape(result) == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-14)
    if b.ndim == 2:
        np.testing.assert_allclose(npattn.matmul(a, npattn.pack_matrix(b)), expected, rtol=1e-13, atol=1e-14)
    if expected.ndim:
        out = np.empty(expected.shape)
        assert npattn.matmul(a, b, out=out) is out
        assert_same_bits(out, result)


@pytest.mark.parametrize("rows", [3, 20])
def test_layouts(rows: int) -> None:
    a, b = normal(rows, 70, dtype=np.float32), normal(70, 40, dtype=np.float32, seed=1)
    expected = npattn.matmul(a, b)
    turned = npattn.matmul(a, b.T.copy().T)  # three rows are multiplied by the columns of b as they lie
    for (a_name, a_view), (b_name, b_view) in product(layouts_of(a), layouts_of(b)):
        wanted = turned if b_view.strides[0] == b.itemsize else expected
        assert np.array_equal(npattn.matmul(a_view, b_view), wanted), (a_name, b_name)
    for name, b_view in layouts_of(b):
        assert np.array_equal(npattn.matmul(a, npattn.pack_matrix(b_view)), expected), name
    for name, out in layouts_of(np.zeros_like(expected)):
        if out.flags.writeable and out.dtype.isnative:
            assert np.array_equal(npattn.matmul(a, b, out=out), expected), name
    stacked = broadcast(a[None], (0,))
    assert_same_bits(npattn.matmul(stacked, b)[0], expected)


def test_out_overlaps() -> None:
    a, b = normal(20, 20), normal(20, 20, seed=1)
    expected = npattn.matmul(a, b)
    for source in ("a", "b"):
        left, right = a.copy(), b.copy()
        target = left if source == "a" else right
        assert_same_bits(npattn.matmul(left, right, out=target), expected)
    square = a.copy()
    assert_same_bits(npattn.matmul(square, square.T, out=square), npattn.matmul(a, a.T))


@pytest.mark.parametrize("shape", [(2, 400, 900), (300, 700, 300), (1, 3000, 2500), (200, 64, 2300)])
def test_threads_rows_and_batches_share_bits(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    a, b = normal(rows, depth, dtype=np.float32), normal(depth, columns, dtype=np.float32, seed=1)
    with npattn.threads(1):
        expected = npattn.matmul(a, b)
    for threads in (2, 3, 7):
        with npattn.threads(threads):
            assert_same_bits(npattn.matmul(a, b), expected)
            assert_same_bits(npattn.matmul(a, npattn.pack_matrix(b)), expected)
    assert_same_bits(npattn.matmul(a[-1:], b), expected[-1:])
    assert_same_bits(npattn.matmul(np.stack([a, a]), b)[1], expected)


def test_dtypes() -> None:
    integers = np.arange(12).reshape(3, 4)
    exact = npattn.matmul(integers, integers.T)
    assert exact.dtype == np.float64
    assert np.array_equal(exact, integers @ integers.T)
    assert npattn.matmul(np.ones((2, 3), bool), np.ones((3, 2), np.float32)).dtype == np.float64
    single, double = normal(3, 4, dtype=np.float32), normal(4, 2)
    assert npattn.matmul(single, double).dtype == np.float64
    assert npattn.matmul(single, npattn.pack_matrix(double)).dtype == np.float64
    assert npattn.matmul(double.T, npattn.pack_matrix(double.astype(np.float32))).dtype == np.float64
    assert npattn.matmul(single, double, dtype=np.float32).dtype == np.float32
    half = np.full((1, 70000), 1.0, np.float16)
    assert np.isinf(npattn.matmul(half, half.T))
    assert npattn.matmul(half, half.T, dtype=np.float32) == 70000


def test_packed_matrix() -> None:
    b = normal(40, 33, dtype=np.float32)
    packed = npattn.pack_matrix(b)
    assert packed.shape == (40, 33)
    assert packed.ndim == 2
    assert packed.dtype == np.float32
    assert packed.nbytes >= b.nbytes
    assert repr(packed) == "PackedMatrix(shape=(40, 33), dtype=float32)"
    expected = npattn.matmul(b.T, b)
    again = pickle.loads(pickle.dumps(packed))
    assert_same_bits(np.asarray(again), b)
    kept = b.copy()
    b[:] = 0
    assert_same_bits(np.asarray(packed), kept)
    for isa in each_isa():  # packed under one instruction set, multiplied under another
        assert np.allclose(npattn.matmul(kept.T, packed), expected, atol=1e-4), isa
    assert npattn.pack_matrix(kept, dtype=np.float64).dtype == np.float64
    assert npattn.pack_matrix(kept, dtype=np.float16).dtype == np.float16
    assert_same_bits(np.asarray(npattn.pack_matrix(packed)), kept)
    with pytest.raises(AttributeError, match="immutable"):
        packed.dtype = np.dtype(np.float64)


def test_a_bad_element_stays_in_its_row_and_column() -> None:
    a, b = normal(30, 70), normal(70, 50, seed=1)
    expected = npattn.matmul(a, b)
    a[5, 3], b[7, 9] = np.nan, np.inf
    result = npattn.matmul(a, b)
    assert np.isnan(result[5]).all()
    assert not np.isfinite(result[:, 9]).any()
    rest = np.ones(result.shape, bool)
    rest[5], rest[:, 9] = False, False
    assert np.array_equal(result[rest], expected[rest])


def test_errors() -> None:
    a, b = normal(3, 4), normal(4, 2)
    with pytest.raises(ValueError, match=r"a \(3, 4\) has 4 columns, b \(3, 4\) another number of rows"):
        npattn.matmul(a, a)
    with pytest.raises(ValueError, match="another number of rows"):
        npattn.matmul(a, npattn.pack_matrix(a))
    with pytest.raises(ValueError, match="0-d"):
        npattn.matmul(a, 2.0)
    with pytest.raises(ValueError, match=r"leading axes.*do not broadcast"):
        npattn.matmul(np.ones((2, 3, 4)), np.ones((3, 4, 2)))
    with pytest.raises(TypeError, match="complex"):
        npattn.matmul(a.astype(complex), b)
    with pytest.raises(TypeError, match="float16 and bfloat16"):
        npattn.matmul(a.astype(np.float16), b.astype(DTYPES["bfloat16"]))
    with pytest.raises(TypeError, match="int32"):
        npattn.matmul(a, b, dtype=np.int32)
    with pytest.raises(ValueError, match=r"out has shape \(3, 3\); the result has \(3, 2\)"):
        npattn.matmul(a, b, out=np.empty((3, 3)))
    with pytest.raises(TypeError, match="out has dtype float32"):
        npattn.matmul(a, b, out=np.empty((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"b has shape \(2, 3, 4\); expected a matrix"):
        npattn.pack_matrix(np.ones((2, 3, 4)))
