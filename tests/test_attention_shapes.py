"""Ranks, leading axes, axis order, empty sizes and extreme positions of attention."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within, random_qkv, tolerances_of

pytestmark = pytest.mark.usefixtures("isa")
INT64 = np.iinfo(np.int64)

# leading axes of query, key, value: the outputs have their broadcast
LEADING = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 3), (3,), ()),
    ((1,), (4,), (1,)),
    ((), (2,), (2,)),
    ((2, 1), (1, 3), (3,)),
    ((1, 2), (1, 2), (5, 1)),
    ((0,), (1,), (0,)),
]


def of(leading: tuple[int, ...], array: Array) -> Array:
    """Different numbers in each item of the leading axes."""
    count = int(np.prod(leading))
    return (array + 0.1 * np.arange(count).reshape(*leading, 1, 1, 1)).astype(array.dtype)


@pytest.mark.parametrize("lengths", [(1, 20), (5, 9), (20, 40)], ids=str)
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_leading_axes_broadcast(leading: tuple[tuple[int, ...], ...], lengths: tuple[int, int]) -> None:
    one = random_qkv((), (4, 2), lengths, (8, 6))
    query, key, value = (of(axes, array) for axes, array in zip(leading, one, strict=True))
    shape = np.broadcast_shapes(*leading)
    out, weights, lse = sdpa(query, key, value, return_weights=True, return_lse=True)
    assert out.shape == (*shape, 4, lengths[0], 6)
    assert weights.shape == (*shape, 4, *lengths)
    assert lse.shape == (*shape, 4, lengths[0])
    whole = [np.broadcast_to(array, shape + array.shape[-3:]).copy() for array in (query, key, value)]
    for got, wanted in zip(
        (out, weights, lse), sdpa(*whole, return_weights=True, return_lse=True), strict=True
    ):
        assert_same_bits(got, wanted)
    expected = reference.scaled_dot_product_attention(query, key, value)
    assert_within(out, expected, tolerances_of(query, key, value).output)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_options_follow_the_leading_axes(leading: tuple[int, ...]) -> None:
    query, key, value = random_qkv(leading, (4, 2), (6, 11), (8, 8))
    rng = np.random.default_rng(0)
    shapes = [leading, leading[-1:], ()]
    for shape in shapes:
        options: dict[str, Any] = {
            "query_offset": rng.integers(0, 6, shape),
            "kv_lengths": rng.integers(0, 12, shape),
            "alibi_slopes": rng.random((*shape, 4)),
            "is_causal": True,
        }
        expected = reference.scaled_dot_product_attention(query, key, value, **options)
        assert_within(sdpa(query, key, value, **options), expected, 2e-6)


def test_ranks() -> None:
    query, key, value = random_qkv((1,), (1, 1), (5, 9), (8, 6))
    out, weights, lse = sdpa(query, key, value, return_weights=True, return_lse=True)
    for drop in (1, 2):
        cut = tuple([0] * drop)
        less = sdpa(query[cut], key[cut], value[cut], return_weights=True, return_lse=True)
        for got, wanted in zip(less, (out, weights, lse), strict=True):
            assert_same_bits(got, wanted[cut])
    assert sdpa(query[0, 0], key[0, 0], value[0, 0]).shape == (5, 6)
    lists = sdpa(query[0, 0].tolist(), key[0, 0].tolist(), value[0, 0].tolist())
    assert lists.dtype == np.float64
    assert_within(lists, out[0, 0], 1e-6)
    mixed = sdpa(query[0], key[0, 0][None], value[0])
    assert_same_bits(mixed, out[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_axis_order(dtype: str) -> None:
    query, key, value = random_qkv((2, 3), (4, 2), (5, 9), (8, 6), DTYPES[dtype])
    expected = sdpa(query, key, value, return_weights=True, return_lse=True)
    for ndim in (3, 4, 5):
        cut = (0,) * (5 - ndim)
        arrays = [array[cut].swapaxes(-2, -3) for array in (query, key, value)]
        out, weights, lse = sdpa(*arrays, layout="BSHD", return_weights=True, return_lse=True)
        assert_same_bits(out.swapaxes(-2, -3), expected[0][cut])
        assert_same_bits(weights, expected[1][cut])
        assert_same_bits(lse, expected[2][cut])
    with pytest.raises(ValueError, match=r"(?s)layout.*BHSD.*BSHD"):
        sdpa(query, key, value, layout="SBHD")


@pytest.mark.parametrize("position_dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16])
def test_integer_dtypes_of_positions(position_dtype: type) -> None:
    """16-bit, 8-bit and unsigned integers do not wrap."""
    query, key, value = random_qkv((2,), (2, 2), (90, 130), (8, 8))
    offsets, lengths = np.array([100, 40]), np.array([120, 90])
    expected = sdpa(query, key, value, is_causal=True, query_offset=offsets, kv_lengths=lengths)
    small = (offsets.astype(position_dtype), lengths.astype(position_dtype))
    narrow = sdpa(query, key, value, is_causal=True, query_offset=small[0], kv_lengths=small[1])
    assert_same_bits(narrow, expected)


@pytest.mark.parametrize("lengths", [(1, 40), (20, 40)], ids=str)
def test_extreme_positions(lengths: tuple[int, int]) -> None:
    """Offsets far beyond the keys or before them, windows of any width: no overflow, no wrap."""
    query, key, value = random_qkv((), (2, 2), lengths, (8, 8))
    plain = sdpa(query, key, value)
    for far in (2**31, 2**40, 2**62):
        assert_same_bits(sdpa(query, key, value, is_causal=True, query_offset=far), plain)
        assert not sdpa(query, key, value, is_causal=True, query_offset=-far).any()
        assert_same_bits(sdpa(query, key, value, window=(far, far), query_offset=0), plain)
        assert not sdpa(query, key, value, window=(5, 5), query_offset=far).any()
        assert not sdpa(query, key, value, window=(5, 5), query_offset=-far).any()
    assert_same_bits(sdpa(query, key, value, window=(None, None), query_offset=0), plain)
    assert_same_bits(sdpa(query, key, value, window=(INT64.max, INT64.max), query_offset=3), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_is_copied(dtype: str) -> None:
    """With one visible key the output is its value, bit for bit."""
    query, key, value = random_qkv((2,), (4, 2), (40, 50), (8, 12), DTYPES[dtype])
    for place in (0, 17, 49):
        keep = np.arange(50) == place
        out, weights = sdpa(query, key, value, keep, return_weights=True)
        assert (out == np.repeat(value[:, :, place : place + 1], 2, axis=1)).all()
        assert (weights.astype(np.float64) == keep).all()


def test_integers_and_bool_become_float64() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.integers(-3, 4, (2, 5, 8)), rng.integers(-3, 4, (2, 7, 8))
    value = rng.random((2, 7, 4)) < 0.5
    out = sdpa(query, key, value)
    assert out.dtype == np.float64
    assert_same_bits(out, sdpa(query.astype(float), key.astype(float), value.astype(float)))
    single = sdpa(query.astype(np.int8), key.astype(np.float32), value.astype(np.float32))
    assert single.dtype == np.float64


def test_inputs_are_left_alone() -> None:
    arrays = random_qkv((2,), (4, 2), (20, 30), (8, 8))
    mask = np.zeros((20, 30), np.float32)
    before = [array.tobytes() for array in (*arrays, mask)]
    for array in (*arrays, mask):
        array.flags.writeable = False
    npattn.scaled_dot_product_attention(*arrays, mask, return_weights=True, return_lse=True)
    assert [array.tobytes() for array in (*arrays, mask)] == before
