"""Recorded faults of other systems: strides, aliasing, large offsets, the FP environment, determinism."""

from __future__ import annotations

import subprocess
import sys

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import every_second, fortran, pattern, poisoned_border, reversed_axes, swapped_axes
from support import DTYPES, assert_case, assert_close, assert_same_bits, filled_qkv

pytestmark = pytest.mark.usefixtures("isa")


VIEWS = (fortran, swapped_axes, every_second, poisoned_border, reversed_axes)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ARR_01(dtype: str) -> None:
    arrays = filled_qkv((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8), DTYPES[dtype])
    query, key, value = arrays
    expected = sdpa(*arrays)
    row = [-0.275434954, -0.195766062, 0.413676029, -0.554608637]
    row += [-0.0913470279, -0.109293063, -0.0473563779, -0.0309759578]
    assert_case(expected[1, 2, 3], row)
    for view in VIEWS:
        assert_same_bits(sdpa(*map(view, arrays)), expected)
        for place in range(3):
            mixed = [view(array) if i == place else array for i, array in enumerate(arrays)]
            assert_same_bits(sdpa(*mixed), expected)
    others = [
        ((query, key[:, :, ::-1], value), [-0.217951846, -0.129693311, 0.421062171, -0.498986013]),
        ((query[..., ::-1], key, value), [-0.24065588, -0.0919385499, 0.395327671, -0.50563761]),
        (
            (query, np.broadcast_to(key[:1, :1], key.shape), np.broadcast_to(value[:1, :1], value.shape)),
            [-0.52688795, -0.358868651, 0.0267902382, 0.101158748],
        ),
    ]
    for different, numbers in others:
        out = sdpa(*different)
        assert_case(out[1, 2, 3, :4], numbers)
        assert_same_bits(out, sdpa(*[np.ascontiguousarray(array) for array in different]))


def test_ARR_01_masks() -> None:
    arrays = filled_qkv((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8))
    for argument, mask in (
        ("attn_mask", pattern((2, 3, 4, 6), 29, 7)),
        ("bias", pattern((2, 3, 4, 6), 29, 7)),
        ("attn_mask", pattern((2, 3, 4, 6), 29, 7) > -0.5),
    ):
        expected = sdpa(*arrays, **{argument: mask})
        for view in (fortran, swapped_axes, reversed_axes, poisoned_border):
            assert_same_bits(sdpa(*arrays, **{argument: view(mask)}), expected)
        wide = np.repeat(mask, 2, axis=-1)
        assert_same_bits(sdpa(*arrays, **{argument: wide[..., ::2]}), expected)


def test_ARR_01_blocks() -> None:
    x = pattern((2, 3, 6, 8), 37, 5)
    cos, sin = npattn.rope_cos_sin(6, 8, dtype=np.float64)
    soft, rotated = npattn.softmax(x), npattn.rotary_embedding(x, cos, sin)
    merged = npattn.merge_heads(x)
    for view in VIEWS:
        assert_same_bits(npattn.softmax(view(x)), soft)
        assert_same_bits(npattn.rotary_embedding(view(x), cos, sin), rotated)
        assert_same_bits(npattn.merge_heads(view(x)), merged)
        out = view(np.zeros_like(x))
        assert npattn.softmax(x, out=out) is out
        assert_same_bits(out, soft)


def test_ARR_03() -> None:
    expected = [0.0320586033, 0.0871443187, 0.236882818, 0.64391426]
    x = np.array([1.0, 2, 3, 4])
    assert npattn.softmax(x, out=x) is x
    assert_case(x, expected)
    buffer = np.array([9.0, 1, 2, 3, 4])
    npattn.softmax(buffer[1:], out=buffer[:-1])
    assert_case(buffer[:-1], expected)
    assert_case(buffer[-1], 4.0)
    x = np.array([[1.0, 2, 3, 4]])
    npattn.rotary_embedding(x, *npattn.rope_cos_sin([1], 4, dtype=np.float64), out=x)
    assert_case(x[0], [-1.98411065, 1.95990067, 2.4623779, 4.01979967])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("length", [6, 300])
def test_ARR_03_attention(dtype: str, length: int) -> None:
    original = filled_qkv(*[(2, 3, length, 8)] * 3, DTYPES[dtype])
    expected = sdpa(*original)
    for place in range(3):
        arrays = [array.copy() for array in original]
        assert sdpa(*arrays, out=arrays[place]) is arrays[place]
        assert_same_bits(arrays[place], expected)
    buffer = np.zeros((3, 3, length, 8), DTYPES[dtype])
    buffer[1:] = original[2]
    assert_same_bits(sdpa(*original[:2], buffer[1:], out=buffer[:-1]), expected)
    base = np.full((2, 3, 2 * length, 17), 5.0, DTYPES[dtype])
    out = base[:, :, ::2, 1::2]
    assert sdpa(*original, out=out) is out
    assert_same_bits(np.ascontiguousarray(base[:, :, ::2, 1::2]), expected)
    assert (base[:, :, 1::2] == 5).all()
    assert (base[..., ::2] == 5).all()
    fortran = np.zeros(expected.shape, expected.dtype, order="F")
    assert_same_bits(sdpa(*original, out=fortran), expected)
    for bad in (np.zeros((2, 3, length, 9), DTYPES[dtype]), np.zeros(expected.shape, np.float16)):
        with pytest.raises((ValueError, TypeError), match="out"):
            sdpa(*original, out=bad)
    locked = np.zeros_like(expected)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        sdpa(*original, out=locked)
    assert not locked.any()


def test_ARR_04() -> None:
    try:
        base = np.zeros(2**31 + 64, np.float16)
    except MemoryError:
        pytest.skip("4.3 GB of virtual memory were refused")
    rows = np.lib.stride_tricks.as_strided(base, (1, 1, 3, 8), (0, 0, 2**31, 2))
    rows[...] = pattern((3, 8), 53, 11)
    query, value = pattern((1, 1, 2, 8), 37, 5, np.float16), pattern((1, 1, 3, 8), 71, 3, np.float16)
    near = np.ascontiguousarray(rows)
    assert_same_bits(sdpa(query, rows, value), sdpa(query, near, value))
    assert_same_bits(sdpa(query, near, rows), sdpa(query, near, near))
    assert_close(sdpa(query, rows, value), reference.scaled_dot_product_attention(query, near, value), 2e-3)


ENVIRONMENT = """
import threading
import numpy as np
import npattn

def check():
    assert (np.array([1e-40], np.float32) * np.float32(1))[0] != 0
    assert (np.array([1e-310]) * 1.0)[0] != 0
    assert float(np.finfo(np.float32).smallest_subnormal) == 2.0**-149
    assert float(np.finfo(np.float64).smallest_subnormal) == 2.0**-1074
    third = np.array([1.0]) / np.array([3.0])
    assert third[0].hex() == "0x1.5555555555555p-2"

check()
npattn.set_num_threads(2)
for name in npattn.isa.available():
    npattn.isa.use(name)
    for dtype in (np.float32, np.float64, np.float16):
        x = np.linspace(-1, 1, 4 * 60 * 16).reshape(4, 60, 16).astype(dtype)
        npattn.scaled_dot_product_attention(x, x, x, is_causal=True, return_weights=True)
        npattn.scaled_dot_product_attention(x[:, :1], x, x)
        npattn.softmax(x)
        npattn.matmul(x, x.swapaxes(1, 2))
        npattn.apply_rope(x, x, np.arange(60))
        npattn.merge_heads(x)
        check()
thread = threading.Thread(target=check)
thread.start()
thread.join()
print("untouched")
"""


def test_ARR_05() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENVIRONMENT], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "untouched\n"


def test_ARR_07() -> None:
    arrays = filled_qkv((8, 4, 33, 72), (8, 4, 65, 72), (8, 4, 65, 72), np.float32)
    options = {"is_causal": True, "query_offset": 32}
    expected = sdpa(*arrays, **options)
    assert_close(expected, reference.scaled_dot_product_attention(*arrays, **options), 3e-6)
    for _ in range(10):
        assert_same_bits(sdpa(*arrays, **options), expected)
    for item in range(8):
        assert_same_bits(
            sdpa(*[array[item : item + 1] for array in arrays], **options), expected[item : item + 1]
        )
    assert_same_bits(sdpa(*[array[::-1] for array in arrays], **options)[::-1], expected)
    for count in (1, 2, 3, 8):
        with npattn.threads(count):
            assert_same_bits(sdpa(*arrays, **options), expected)


def test_ARR_08() -> None:
    soft = npattn.softmax(np.array([0, 1e-9]))
    assert soft.dtype == np.float64
    assert_close(soft, [0.49999999975, 0.50000000025], 1e-14)
    column = np.array([[0.0], [1e-9]])
    out = sdpa(np.ones((1, 1)), column, np.array([[0.0], [1.0]]), scale=1)
    assert abs(out[0, 0] - 0.50000000025) < 1e-15

    arrays = filled_qkv((2, 5, 8), (2, 7, 8), (2, 7, 8))
    bias = pattern((5, 7), 29, 7)
    names = ["float16", "float32", "float64"]
    for query_name in names:
        for key_name in names:
            mixed = [
                array.astype(DTYPES[n])
                for array, n in zip(arrays, (query_name, key_name, key_name), strict=True)
            ]
            expected_dtype = np.result_type(*mixed)
            tolerance = {2: 2e-3, 4: 3e-6, 8: 1e-12}[expected_dtype.itemsize]
            for mask in (bias, bias.astype(np.float16), bias > 0):
                out = sdpa(*mixed, mask)
                assert out.dtype == expected_dtype
                assert_close(out, reference.scaled_dot_product_attention(*mixed, mask), tolerance)
    integers = [np.round(4 * array).astype(np.int64) for array in arrays]
    out = sdpa(*integers)
    assert out.dtype == np.float64
    assert_same_bits(out, sdpa(*[array.astype(np.float64) for array in integers]))
    complex_key = arrays[1].astype(np.complex128)
    for call in (
        lambda: sdpa(arrays[0], complex_key, arrays[2]),
        lambda: npattn.softmax(complex_key),
        lambda: npattn.matmul(complex_key, complex_key.swapaxes(1, 2)),
    ):
        with pytest.raises(TypeError, match="complex"):
            call()
