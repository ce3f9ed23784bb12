"""A few rows times the transpose of a matrix, as torch's Linear keeps its weights: read as it lies."""

from __future__ import annotations

from collections.abc import Callable

import npattn
import numpy as np
import pytest
from npattn import reference
from shapes import Array, broadcast, layouts_of
from support import DTYPES, assert_same_bits
from tolerances import tolerance

pytestmark = pytest.mark.usefixtures("isa")

MOST_ROWS = 32  # more are multiplied by packed panels
# Rows at and beside the tiles of 2, 3 and 4 and their multiples; columns at and beside tiles of 4 and 6 and
# registers of 4, 8 and 16; depths at and beside registers and the 256 (bfloat16: 512) copied at a time.
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, MOST_ROWS, MOST_ROWS + 1)
COLUMNS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 50)
DEPTHS = (0, 1, 31, 32, 33, 63, 255, 256, 257, 511, 512, 513, 1100)
SHAPES = (
    *((rows, 260, 19) for rows in ROWS),
    *((3, 40, columns) for columns in COLUMNS),
    *((rows, depth, 7) for rows in (1, 4) for depth in DEPTHS),
    (1, 9000, 5),  # more depths than are summed at a time
    (MOST_ROWS, 1700, 17),
    (2, 40, 9000),  # more columns
)


def operands(rows: int, depth: int, columns: int, dtype: object = np.float32) -> tuple[Array, Array]:
    """x (rows, depth) and w (columns, depth)."""
    rng = np.random.default_rng([rows, depth, columns])
    return (
        rng.standard_normal((rows, depth)).astype(dtype),
        rng.standard_normal((columns, depth)).astype(dtype),
    )


def assert_product(actual: Array, x: Array, w: Array) -> None:
    """x w.T within what sums of that depth may lose."""
    expected = reference.matmul(x, w.swapaxes(-1, -2))
    wide = [np.abs(array.astype(np.float64)) for array in (x, w)]
    magnitude = reference.matmul(wide[0], wide[1].swapaxes(-1, -2))
    assert actual.shape == expected.shape
    allowed = tolerance(actual.dtype, x.shape[-1], 1.0) * np.maximum(magnitude, 1.0)
    assert np.all(np.abs(actual.astype(np.float64) - expected) <= allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_shapes(shape: tuple[int, int, int], dtype: str) -> None:
    x, w = operands(*shape, dtype=DTYPES[dtype])
    result = npattn.matmul(x, w.T)
    assert result.dtype == x.dtype
    assert_product(result, x, w)
    if shape[0] > MOST_ROWS:
        assert_same_bits(result, npattn.matmul(x, npattn.pack_matrix(w.T)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_rows_and_half_weights(dtype: str) -> None:
    x, w = operands(3, 100, 21)
    half = w.astype(DTYPES[dtype])
    result = npattn.matmul(x, half.T)
    assert result.dtype == np.float32
    assert_product(result, x, half)
    mixed = npattn.matmul(x.astype(DTYPES[dtype]), half.T, dtype=np.float32)
    assert mixed.dtype == np.float32
    assert_product(mixed, x.astype(DTYPES[dtype]), half)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype: str) -> None:
    x, w = operands(5, 70, 21, DTYPES[dtype])
    expected = npattn.matmul(x, w.T)
    for name, view in layouts_of(x):
        assert np.array_equal(npattn.matmul(view, w.T), expected), name
    for name, view in layouts_of(w):
        result = npattn.matmul(x, view.T)
        if view.strides[1] == w.itemsize:
            assert np.array_equal(result, expected), name
        else:
            assert_product(result, x, w)
    for view in (w[::-1], np.repeat(w, 3, axis=0)[::3], np.hstack([w, w])[:, 70:]):  # columns in any distance
        assert view.strides[1] == w.itemsize
        assert_product(npattn.matmul(x, view.T), x, view)
    same = broadcast(w)
    assert_product(npattn.matmul(x, same.T), x, same)
    for name, out in layouts_of(np.zeros_like(expected)):
        if out.flags.writeable and out.dtype.isnative:
            assert np.array_equal(npattn.matmul(x, w.T, out=out), expected), name


def test_batches() -> None:
    x, w = operands(12, 40, 18)
    x, w = x.reshape(3, 4, 40), w.reshape(3, 6, 40)
    result = npattn.matmul(x, w.swapaxes(-1, -2))
    for part, rows, columns in zip(result, x, w, strict=True):
        assert_same_bits(part, npattn.matmul(rows, columns.T))
    result = npattn.matmul(x[:, None], w.swapaxes(-1, -2))
    assert_product(result, x[:, None], w[None])
    vector = npattn.matmul(x[0, 0], w[0].T)
    assert_same_bits(vector, npattn.matmul(x[0, :1], w[0].T)[0])
    assert_product(npattn.matmul(x[0, :1], w[0, 0])[:, None], x[0, :1], w[0, :1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3000, 2500), (4, 600, 1030), (15, 700, 900), (MOST_ROWS, 600, 513)])
def test_threads_share_bits(shape: tuple[int, int, int], dtype: str) -> None:
    x, w = operands(*shape, dtype=DTYPES[dtype])
    with npattn.threads(1):
        expected = npattn.matmul(x, w.T)
    for threads in (2, 3, 7):
        with npattn.threads(threads):
            assert_same_bits(npattn.matmul(x, w.T), expected)
            stacked = npattn.matmul(np.stack([x, x]), np.stack([w, w]).swapaxes(-1, -2))
            assert_same_bits(stacked[1], expected)
    assert_same_bits(npattn.matmul(x, w[5:].T), expected[:, 5:].copy())


def test_out_overlaps() -> None:
    x, w = operands(6, 40, 40)
    expected = npattn.matmul(x, w.T)
    rows = x.copy()
    assert_same_bits(npattn.matmul(rows, w.T, out=rows), expected)
    columns = w.copy()
    assert npattn.matmul(x, columns.T, out=columns[3:9]).base is columns
    assert_same_bits(columns[3:9].copy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_element_stays_in_its_row_and_column(dtype: str) -> None:
    x, w = operands(7, 75, 23, DTYPES[dtype])
    npattn.matmul(np.full_like(x, np.nan), w.T)  # leaves NaN in scratch memory
    expected = npattn.matmul(x, w.T)
    assert np.isfinite(expected.astype(np.float64)).all()
    x[5, 74], w[9, 0], w[10, 74] = np.nan, np.inf, np.nan
    result = npattn.matmul(x, w.T).astype(np.float64)
    assert np.isnan(result[5]).all()
    assert np.isinf(np.delete(result[:, 9], 5)).all()
    assert np.isnan(result[:, 10]).all()
    rest = np.ones(result.shape, bool)
    rest[5], rest[:, 9:11] = False, False
    assert np.array_equal(result[rest], expected.astype(np.float64)[rest])


INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape),
    "large offset": lambda rng, shape: rng.standard_normal(shape) + 100,
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize(("rows", "depth"), [(1, 1000), (4, 5000)])
def test_error_is_at_most_twice_that_of_numpy(kind: str, rows: int, depth: int) -> None:
    rng = np.random.default_rng(rows)
    columns = 10000 // rows
    x = INPUTS[kind](rng, (rows, depth)).astype(np.float32)
    w = INPUTS[kind](rng, (columns, depth)).astype(np.float32)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    ours, numpys = (np.abs(result - exact) for result in (npattn.matmul(x, w.T), x @ w.T))
    assert np.sqrt(np.mean(ours**2)) <= 2 * np.sqrt(np.mean(numpys**2))
    assert ours.max() <= 2 * numpys.max()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("depth", [64, 256, 1000])
def test_error_of_a_matrix_times_a_vector(kind: str, depth: int) -> None:
    rng = np.random.default_rng(depth)
    x, v = (INPUTS[kind](rng, shape).astype(np.float32) for shape in ((10000, depth), (depth, 1)))
    exact = x.astype(np.float64) @ v.astype(np.float64)
    ours, numpys = (np.abs(result - exact) for result in (npattn.matmul(x, v), x @ v))
    assert np.sqrt(np.mean(ours**2)) <= 2 * np.sqrt(np.mean(numpys**2))
    assert ours.max() <= 2 * numpys.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 300])
def test_a_single_column(rows: int, dtype: str) -> None:
    x, w = operands(rows, 130, 1, dtype=DTYPES[dtype])
    expected = npattn.matmul(x, w.T)
    assert_product(expected, x, w)
    if rows > 1:
        assert_same_bits(npattn.matmul(x, w[0]), expected[:, 0].copy())
    with npattn.threads(3):
        assert_same_bits(npattn.matmul(x, w.T), expected)
    batch = np.stack([x, x])
    assert_product(npattn.matmul(batch, w.T), batch, np.stack([w, w]))
    wide = np.full((rows, 3), 7, dtype=x.dtype)  # whose columns are not contiguous
    assert_product(npattn.matmul(x, w.T, out=wide[:, 1:2]), x, w)
    assert (wide[:, [0, 2]] == 7).all()
    assert_product(npattn.matmul(np.asfortranarray(x), w.T), x, w)
