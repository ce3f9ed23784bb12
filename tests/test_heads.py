"""split_heads and merge_heads: views, copies, any dtype, any memory, errors."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pure_python
import pytest
from hypothesis import given
from hypothesis import strategies as st
from npattn import reference
from shapes import Array, every_second, layouts_of, poisoned_border, reversed_axes, unaligned
from support import DTYPES, assert_same_bits

pytestmark = pytest.mark.usefixtures("isa")

# Item sizes 1, 2, 4, 8, 16 with a kernel; 12, 32 and references without.
ANY_DTYPES = (
    *map(
        str,
        (np.dtype(np.int8), np.dtype(bool), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)),
    ),
    "complex128",
    "longdouble",
    "complex256",
    "datetime64[s]",
    ">f4",
    "S3",
    "U3",
    "i4,f8",
    "object",
)


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    count = np.arange(int(np.prod(shape))).reshape(shape)
    if np.dtype(dtype).names:
        records = np.zeros(shape, dtype)
        records["f0"], records["f1"] = count, -count
        return records
    return (count % 2 == 0).astype(dtype) if dtype == "bool" else count.astype(dtype)


def assert_equal(actual: Array, expected: Array) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert (actual == expected).all()


@pytest.mark.parametrize("dtype", ANY_DTYPES)
def test_any_dtype(dtype: str) -> None:
    x = numbers((2, 9, 12), dtype)
    view = npattn.split_heads(x, 3)
    assert np.shares_memory(view, x)
    assert_equal(view, reference.split_heads(x, 3))
    copied = npattn.split_heads(x, 3, copy=True)
    assert not np.shares_memory(copied, x)
    assert copied.flags.c_contiguous
    assert_equal(copied, view)
    for heads in (view, copied):
        merged = npattn.merge_heads(heads)
        assert not np.shares_memory(merged, heads)
        assert_equal(merged, x)
    out = np.empty((2, 3, 9, 4), dtype)
    assert npattn.split_heads(x, 3, out=out) is out
    assert_equal(out, view)


def test_bfloat16() -> None:
    x = numbers((2, 9, 12), np.float32).astype(DTYPES["bfloat16"])
    assert_same_bits(npattn.merge_heads(npattn.split_heads(x, 3, copy=True)), x)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64", "complex128"])
def test_memory_layouts(dtype: str) -> None:
    for shape in ((5, 6), (2, 7, 12), (2, 1, 33, 34), (3, 17, 40)):
        x = numbers(shape, dtype)
        expected = reference.split_heads(x, 2, copy=True)
        for _, layout in layouts_of(x):
            view = npattn.split_heads(layout, 2)
            assert np.shares_memory(view, layout)
            assert_equal(view, expected.astype(layout.dtype))
            for heads in (view, npattn.split_heads(layout, 2, copy=True)):
                assert_equal(heads, expected.astype(layout.dtype))
                assert_equal(npattn.merge_heads(heads), x.astype(layout.dtype))
        for place in (np.asfortranarray, every_second, poisoned_border, reversed_axes, unaligned):
            out = place(np.zeros_like(expected))
            assert npattn.split_heads(x, 2, out=out) is out
            assert_equal(out, expected)
            merged = place(np.zeros_like(x))
            assert npattn.merge_heads(expected, out=merged) is merged
            assert_equal(merged, x)


def test_bits_are_kept() -> None:
    # Signalling NaNs and denormals too, through every way the copy can take.
    x = np.random.default_rng(0).integers(0, 256, (2, 40, 68 * 8), dtype=np.uint8)
    for dtype in (np.float16, np.float32, np.float64):
        bits = x.view(dtype)
        integers = bits.view(np.dtype(f"i{bits.itemsize}"))
        for layout in (np.ascontiguousarray, np.asfortranarray, every_second):
            heads = npattn.split_heads(
                layout(integers).view(dtype) if layout is not every_second else bits, 4, copy=True
            )
            expected = npattn.split_heads(integers, 4, copy=True)
            assert_same_bits(heads.view(integers.dtype), expected)
            assert_same_bits(npattn.merge_heads(heads).view(integers.dtype), integers)


def test_nothing_outside_out_is_written() -> None:
    for dtype in ("float32", "float64", "float16", "int8"):
        wide = np.zeros((3, 2 * 21, 6), dtype)
        npattn.split_heads(numbers((21, 18), dtype) + 1, 3, out=wide[:, ::2])
        assert not wide[:, 1::2].any()
        assert wide[:, ::2].any(axis=(0, 2)).all()


def test_overlapping_out() -> None:
    for dtype in (np.float32, np.int8):
        x = numbers((6, 8), dtype)
        expected = npattn.split_heads(x, 2, copy=True)
        memory = x.copy()
        npattn.split_heads(memory, 2, out=memory.reshape(2, 6, 4))
        assert_equal(memory.reshape(2, 6, 4), expected)
        npattn.merge_heads(memory.reshape(2, 6, 4), out=memory)
        assert_equal(memory, x)


def test_against_lists() -> None:
    x = numbers((5, 6), np.float64)
    heads = npattn.split_heads(x, 3)
    assert heads.tolist() == pure_python.split(x.tolist(), 3)
    assert npattn.merge_heads(heads).tolist() == pure_python.concat(heads.tolist()) == x.tolist()


def test_large_and_threads() -> None:
    # Above 32 MiB the destination is written with streaming stores; the pieces are copied by all threads.
    x = np.arange(9 * 8192 * 130, dtype=np.float32).reshape(9, 8192, 130)
    for count in (1, 3):
        with npattn.threads(count):
            for source in (x, x.swapaxes(1, 2).copy().swapaxes(1, 2)):
                heads = npattn.split_heads(source, 5, copy=True)
                assert (heads == npattn.split_heads(x, 5)).all()
                out = unaligned(np.zeros_like(x))
                npattn.merge_heads(heads, out=out)
                assert (out == x).all()


def test_empty() -> None:
    for shape in ((0, 3, 8), (2, 0, 8), (2, 3, 0)):
        heads = npattn.split_heads(np.zeros(shape), 4, copy=True)
        assert heads.shape == (shape[0], 4, shape[1], shape[2] // 4)
        assert npattn.merge_heads(heads).shape == shape


def test_errors() -> None:
    x = np.zeros((2, 3, 10))
    with pytest.raises(ValueError, match="num_heads 4 does not divide the last axis of x, 10"):
        npattn.split_heads(x, 4)
    for heads in (0, -2):
        with pytest.raises(ValueError, match=f"num_heads must be at least 1, got {heads}"):
            npattn.split_heads(x, heads)
    for wrong in (2.0, True, "2", None):
        with pytest.raises(TypeError, match="num_heads must be an integer"):
            npattn.split_heads(x, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must have at least two axes.*\(10,\)"):
        npattn.split_heads(x[0, 0], 2)
    with pytest.raises(ValueError, match=r"x must have at least three axes.*\(3, 10\)"):
        npattn.merge_heads(x[0])
    with pytest.raises(ValueError, match=r"out has shape \(2, 3, 10\); the result has \(2, 2, 3, 5\)"):
        npattn.split_heads(x, 2, out=np.zeros_like(x))
    with pytest.raises(TypeError, match="out has dtype float32"):
        npattn.merge_heads(x, out=np.zeros((3, 20), np.float32))
    read_only = np.zeros((3, 20))
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        npattn.merge_heads(x, out=read_only)
    with pytest.raises(TypeError, match="masked array"):
        npattn.split_heads(np.ma.masked_array(x), 2)


@given(data=st.data())
def test_any_view(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3)))
    heads, width = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 20))
    x = numbers(
        (*shape, heads * width),
        data.draw(st.sampled_from(["int8", "int16", "float32", "float64", "complex128"])),
    )
    order = data.draw(st.permutations(range(x.ndim)))
    stored = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    steps = tuple(slice(None, None, data.draw(st.sampled_from([1, -1]))) for _ in shape)
    split = npattn.split_heads(stored[steps], heads, copy=True)
    assert_equal(split, reference.split_heads(x[steps], heads))
    assert_equal(npattn.merge_heads(split), x[steps])
    assert_equal(npattn.merge_heads(npattn.split_heads(stored[steps], heads)), x[steps])
