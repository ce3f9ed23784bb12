"""Recorded faults of other systems: grouped heads, head counts, head and value dims, axis order."""

from __future__ import annotations

import subprocess
import sys

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import pattern
from support import DTYPES, assert_case, assert_close, assert_same_bits, filled_qkv

pytestmark = pytest.mark.usefixtures("isa")


def test_HEAD_01() -> None:
    query, key = np.zeros((1, 4, 1, 2)), np.ones((1, 4, 4, 2))
    values = {1: [1], 2: [1, 2], 4: [0, 1, 2, 3]}
    answers = {1: [1, 1, 1, 1], 2: [1, 1, 2, 2], 4: [0, 1, 2, 3]}
    for kv_heads, numbers in values.items():
        value = np.broadcast_to(np.array(numbers, float)[:, None, None], (1, kv_heads, 4, 2))
        out = sdpa(query, key[:, :kv_heads], value)
        assert_case(out, np.broadcast_to(np.array(answers[kv_heads], float)[:, None, None], (1, 4, 1, 2)))
    query, key, value = filled_qkv((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    repeated = [np.repeat(array, 3, axis=1) for array in (key, value)]
    for options in (
        {"attn_mask": pattern((6, 5, 7), 29, 7) > -0.5},
        {"sinks": pattern((6,), 29, 7)},
        {"alibi_slopes": npattn.alibi_slopes(6), "query_offset": 2},
    ):
        assert_close(sdpa(query, key, value, **options), sdpa(query, *repeated, **options), 1e-12)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(3, 2), (33, 2), (2, 4), (4, 0)])
def test_HEAD_03(query_heads: int, kv_heads: int) -> None:
    query, key = np.zeros((1, query_heads, 3, 4)), np.zeros((1, kv_heads, 3, 4))
    with pytest.raises(ValueError, match=rf"(?s){query_heads}.*{kv_heads}|{kv_heads}.*{query_heads}"):
        sdpa(query, key, key)


def test_HEAD_03_other_counts() -> None:
    for heads in (4, 0, -2):
        with pytest.raises(ValueError, match="num_heads"):
            npattn.split_heads(np.zeros((2, 3, 10)), heads)
        with pytest.raises(ValueError, match="num_heads"):
            npattn.MultiHeadAttention(*[np.zeros((10, 10))] * 4, num_heads=heads)
    query = np.zeros((1, 4, 3, 4))
    with pytest.raises(ValueError, match="value"):
        sdpa(query, np.zeros((1, 2, 5, 4)), np.zeros((1, 4, 5, 4)))
    with pytest.raises(ValueError, match="value"):
        sdpa(query, np.zeros((1, 2, 5, 4)), np.zeros((1, 2, 6, 4)))


HEAD_04 = {
    1: (0.1113669, -1.142748227),
    3: (0.17374874, -2.064220326),
    7: (0.01347708, -1.01312542),
    17: (-0.25505525, -1.475677259),
    40: (0.52934792, -8.927147397),
    65: (0.17283909, -12.91665032),
    72: (0.048701117, -19.11860716),
    80: (-0.023289801, -18.59379609),
    96: (-0.33114891, -23.9788916),
    100: (-0.56059538, -28.5635039),
    112: (-0.089974976, -30.53931362),
    128: (-0.33483971, -34.94010408),
    192: (-0.29529882, -52.30973888),
    200: (0.54978324, -62.48883812),
    256: (0.12397659, -79.76958297),
    576: (0.093776887, -322.2287789),
}


@pytest.mark.parametrize("head_dim", HEAD_04)
def test_HEAD_04(head_dim: int) -> None:
    arrays = filled_qkv((1, 2, 5, head_dim), (1, 2, 7, head_dim), (1, 2, 7, head_dim))
    last, total = HEAD_04[head_dim]
    out = sdpa(*arrays)
    assert_case(out[0, 1, 4, -1], last, digits=1e-8)
    assert_case(out.sum(), total)
    assert_case(sdpa(*[array.astype(np.float32) for array in arrays])[0, 1, 4, -1], last)
    if head_dim == 72:
        expected = [0.0621577927, 0.14994161, 0.149016261, 0.0522170823, -0.281291127, 0.0487011175]
        assert_case(out[0, 1, 4, [0, 15, 16, 63, 64, 71]], expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_HEAD_04_every_width(dtype: str) -> None:
    """Rows are cut from a wider array whose other elements are NaN, so that a read past a row shows."""
    for head_dim in [*range(1, 81), 96, 100, 112, 128, 160, 192, 200, 256, 576]:
        shapes = (1, 2, 5, head_dim), (1, 2, 7, head_dim), (1, 2, 7, head_dim)
        arrays = filled_qkv(*shapes, DTYPES[dtype])
        inside = []
        for array in arrays:
            wide = np.full((*array.shape[:-1], head_dim + 16), np.nan, array.dtype)
            wide[..., :head_dim] = array
            inside.append(wide[..., :head_dim])
        out = sdpa(*inside)
        assert_close(
            out, reference.scaled_dot_product_attention(*arrays), {"float32": 3e-6, "float64": 1e-12}[dtype]
        )
        assert_same_bits(out, sdpa(*arrays))


GUARDED = """
import ctypes, mmap, sys
import numpy as np
import npattn

page = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_end(array):
    '''The same values in the last bytes before a page that may not be read.'''
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = np.frombuffer(memory, np.uint8)
    assert protect(whole.ctypes.data + size, page, 0) == 0
    end = whole[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    end[...] = array
    keep.append(memory)
    return end

keep = []
npattn.isa.use(sys.argv[1])
for dtype in (np.float32, np.float64, np.float16):
    for head_dim in (1, 3, 7, 15, 16, 17, 31, 33, 63, 65, 80):
        for query_len, key_len in ((1, 7), (5, 33), (40, 70)):
            rng = np.random.default_rng(head_dim)
            shapes = [(query_len, head_dim), (key_len, head_dim), (key_len, head_dim)]
            arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
            out = npattn.scaled_dot_product_attention(*map(at_the_end, arrays))
            assert np.array_equal(out, npattn.scaled_dot_product_attention(*arrays))
print("no read past the end")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are set up through mprotect")
def test_HEAD_04_guard_page(isa: str) -> None:
    run = subprocess.run([sys.executable, "-c", GUARDED, isa], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "no read past the end\n"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_HEAD_05(dtype: str) -> None:
    query, key, value = filled_qkv((1, 2, 3, 32), (1, 2, 5, 32), (1, 2, 5, 24), DTYPES[dtype])
    out, lse = sdpa(query, key, value, return_lse=True)
    assert out.shape == (1, 2, 3, 24)
    assert_case(out[0, 1, 2, :4], [0.121053375, 0.0443318488, 0.248356645, -0.418927111])
    assert_case(lse[0, 1], [1.79223776, 1.880494, 1.67298521])
    if dtype == "float64":
        assert_case(out.sum(), 1.162130656)
    out, lse = sdpa(query, key, value, scale=0.0, return_lse=True)
    assert_case(out[0, 1, 2, :4], [0.1640625, 0.04375, 0.2484375, -0.3984375])
    assert_case(lse, np.full((1, 2, 3), np.log(5)))
    out = sdpa(query, key, value, scale=-0.25)
    assert_case(out[0, 1, 2, :4], [0.228732789, 0.046960485, 0.246860901, -0.368069463])
    wider = filled_qkv((1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 40), DTYPES[dtype])
    out = sdpa(*wider)
    assert out.shape == (1, 2, 3, 40)
    assert_close(
        out, reference.scaled_dot_product_attention(*wider), {"float32": 3e-6, "float64": 1e-12}[dtype]
    )


def test_HEAD_05_layer_scale() -> None:
    x = pattern((1, 5, 64), 37, 5)
    layer = npattn.MultiHeadAttention(*[np.eye(64)] * 4, num_heads=4)
    heads = x.reshape(1, 5, 4, 16).swapaxes(1, 2)
    expected = reference.scaled_dot_product_attention(heads, heads, heads, scale=1 / 4)
    assert_close(layer(x), expected.swapaxes(1, 2).reshape(1, 5, 64), 1e-12)


def test_HEAD_06() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    heads = npattn.split_heads(x, 2)
    assert heads.shape == (2, 2, 3, 2)
    expected = {
        (0, 0): [[0, 1], [4, 5], [8, 9]],
        (0, 1): [[2, 3], [6, 7], [10, 11]],
        (1, 0): [[12, 13], [16, 17], [20, 21]],
        (1, 1): [[14, 15], [18, 19], [22, 23]],
    }
    for place, numbers in expected.items():
        assert heads[place].tolist() == numbers
    wide = np.arange(96).reshape(2, 6, 8)
    for layout in (x, np.asfortranarray(x), wide[:, ::2, :4], x[:, ::-1], x[..., ::-1]):
        assert np.shares_memory(npattn.split_heads(layout, 2), layout)
        for copy in (False, True):
            heads = npattn.split_heads(layout, 2, copy=copy)
            assert (heads == layout.reshape(2, 3, 2, 2).swapaxes(1, 2)).all()
            assert (npattn.merge_heads(heads) == layout).all()


def test_HEAD_07() -> None:
    x = pattern((3, 3, 4), 37, 5)
    layer = npattn.MultiHeadAttention(*[np.eye(4)] * 4, num_heads=2)
    out = layer(x)
    assert_case(out[0, 0], [-0.450909038, -0.391464627, 0.434505317, -0.431329413])
    assert_case(out[2, 1], [-0.277339502, 0.0297219014, -0.589728674, -0.578178097])
    for item in range(3):
        assert_close(layer(x[item : item + 1])[0], out[item], 1e-14)
    changed = x.copy()
    changed[1] = 7.0
    assert_same_bits(layer(changed)[[0, 2]], out[[0, 2]])
    assert "batch" in (npattn.MultiHeadAttention.__call__.__doc__ or "")
