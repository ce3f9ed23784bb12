"""Recorded faults of other systems: masks, causal alignment, windows, softcap, sinks, ALiBi."""

from __future__ import annotations

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import pattern
from support import DTYPES, assert_case, assert_close, assert_same_bits, filled_qkv, uniform
from tolerances import CASES

pytestmark = pytest.mark.usefixtures("isa")
INF = np.inf
NAN = np.nan


def lower_triangle(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def additive(keep: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    return np.where(keep, 0.0, -INF).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_MASK_01(dtype: str, kind: str) -> None:
    query, key, value = filled_qkv((1, 2, 6, 8), (1, 2, 10, 8), (1, 2, 10, 8), DTYPES[dtype])
    keep = np.tril(np.ones((6, 10), bool))
    keep[5] = False
    mask = keep if kind == "bool" else additive(keep, DTYPES[dtype])
    out, weights, lse = sdpa(query, key, value, mask, scale=0.125, return_weights=True, return_lse=True)
    assert np.isfinite(out.astype(np.float64)).all()
    assert not out[..., 5, :].any()
    assert not weights[..., 5, :].any()
    assert (lse[..., 5] == -INF).all()
    assert_case(out[0, 1, 4, :4], [0.0231371783, 0.438804143, -0.0562453698, 0.253723233])
    assert_case(out[0, 1, 4, 4:], [0.404508744, 0.136912711, -0.53489121, -0.530501087])
    assert_same_bits(out[0, 0, 0], value[0, 0, 0])
    assert_case(lse[0, 0], [0.175720215, 0.874985457, 1.03321775, 1.42919571, 1.62841718, -INF])
    if dtype == "float64":
        assert_case(out.sum(), -1.99438474572)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_MASK_01_many_keys(dtype: str) -> None:
    query, key, value = filled_qkv((1, 2, 40, 8), (1, 2, 600, 8), (1, 2, 600, 8), DTYPES[dtype])
    keep = pattern((40, 600), 29, 7) > 0
    keep[[0, 5, 39]] = False
    expected, expected_lse = reference.scaled_dot_product_attention(query, key, value, keep, return_lse=True)
    for mask in (keep, additive(keep, DTYPES[dtype])):
        out, lse = sdpa(query, key, value, mask, return_lse=True)
        assert not out[..., [0, 5, 39], :].any()
        assert (lse[..., [0, 5, 39]] == -INF).all()
        assert_close(out, expected, CASES[DTYPES[dtype]])
        assert_close(lse, expected_lse, max(CASES[lse.dtype], 3e-6))


@pytest.mark.parametrize("poisoned", ["key", "value", "both"])
def test_MASK_03(poisoned: str) -> None:
    clean = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 4)
    query, key, value = clean.copy(), clean.copy(), clean.copy()
    if poisoned != "value":
        key[0, 0, 1, 0] = NAN
    if poisoned != "key":
        value[0, 0, 1] = [NAN, INF, -INF, NAN]
    keep = np.array([[True, False], [True, False]])
    hidden = [
        (query, {"attn_mask": keep}, [7.0, 19.0]),
        (query, {"attn_mask": additive(keep, np.float32)}, [7.0, 19.0]),
        (query, {"bias": additive(keep, np.float32)}, [7.0, 19.0]),
        (query, {"kv_lengths": 1}, [7.0, 19.0]),
        (query[:, :, :1], {"is_causal": True, "query_offset": 0}, [7.0]),
        (query[:, :, :1], {"window": (None, 0), "query_offset": 0}, [7.0]),
    ]
    for rows, options, lse in hidden:
        result = sdpa(rows, key, value, **options, return_lse=True)
        untouched = sdpa(rows, clean, clean, **options, return_lse=True)
        assert_same_bits(result[0], untouched[0])
        assert_same_bits(result[1], untouched[1])
        assert (result[0] == np.array([0, 1, 2, 3])).all(), options
        assert (result[1][0, 0] == np.array(lse, np.float32)).all(), options
    # At or above the diagonal of a causal square the first row is clean, the second sees the poison.
    out = sdpa(query, key, value, is_causal=True)
    assert (out[0, 0, 0] == np.array([0, 1, 2, 3])).all()
    assert np.isnan(out[0, 0, 1, 0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_MASK_04(dtype: str) -> None:
    rows = {
        0: [-0.921875, -0.34375, -0.6171875, 0.21875],
        9: [-0.350726103, -0.0859331325, 0.188931718, -0.0265281862],
        31: [-0.166905089, -0.145988607, -0.0535518995, -0.337432599],
        511: [-0.225890238, -0.00437560449, 0.0705161929, -0.106722852],
        512: [-0.161771889, -0.109102949, 0.136679479, -0.0828958007],
        599: [0.0130019366, -0.276236548, -0.120291154, -0.0933204638],
    }
    query, key, value = filled_qkv(*[(1, 1, 600, 8)] * 3, DTYPES[dtype])
    i, j = np.arange(600)[:, None], np.arange(600)
    keep = (i - 9 <= j) & (j <= i)
    for options in (
        {"attn_mask": additive(keep)},
        {"bias": additive(keep)},
        {"attn_mask": keep},
        {"is_causal": True, "window": (9, None)},
        {"window": (9, 0)},
    ):
        out, lse = sdpa(query, key, value, **options, return_lse=True)
        for row, expected in rows.items():
            assert_case(out[0, 0, row, :4], expected)
        assert_case(lse[0, 0, 599], 2.399314578)
        if dtype == "float64":
            assert_case(out.sum(), -181.61117009)


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 513, 1000])
def test_MASK_04_block_borders(length: int) -> None:
    query, key, value = filled_qkv(*[(1, 1, length, 8)] * 3, np.float32)
    i, j = np.arange(length)[:, None], np.arange(length)
    band = (i - 9 <= j) & (j <= i)
    last = np.broadcast_to(j == length - 1, (length, length))
    for keep in (band, last):
        expected = reference.scaled_dot_product_attention(query, key, value, keep)
        for mask in (keep, additive(keep, np.float32)):
            assert_close(sdpa(query, key, value, mask), expected, 3e-6)
    assert (sdpa(query, key, value, last) == value[..., -1:, :]).all()


def test_MASK_05() -> None:
    query, key, value = np.zeros((1, 1, 2, 4)), np.ones((1, 1, 5, 4)), np.eye(5)[None, None]
    lower_right = sdpa(query, key, value, is_causal=True, query_offset=3)
    upper_left = sdpa(query, key, value, is_causal=True, query_offset=0)
    assert_case(lower_right[0, 0], [[0.25, 0.25, 0.25, 0.25, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    assert_case(upper_left[0, 0], [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
    with pytest.raises(ValueError, match="query_offset"):
        sdpa(query, key, value, is_causal=True)

    query, key, value = filled_qkv(*[(1, 2, 7, 4)] * 3)
    full = sdpa(query, key, value, is_causal=True)
    chunk = sdpa(query[:, :, 4:], key, value, is_causal=True, query_offset=4)
    steps = [
        sdpa(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], is_causal=True, query_offset=t)
        for t in (4, 5, 6)
    ]
    assert_close(chunk, full[:, :, 4:], 1e-12)
    assert_close(np.concatenate(steps, axis=2), full[:, :, 4:], 1e-12)
    head_0 = [
        [-0.00753916121, 0.104703527, 0.045152413, 0.239261311],
        [-0.170940544, -0.259253691, -0.20896267, 0.376620217],
        [-0.068481015, -0.0479269755, 0.0275445513, 0.248943185],
    ]
    assert_case(full[0, 0, 4:], head_0)
    assert_case(full[0, 1, 6], [-0.598394888, -0.185932123, 0.112824179, 0.103742633])


def test_MASK_07() -> None:
    third = 1 / 3
    lower = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [third, third, third, 0], [0.25] * 4]
    upper = [[0, third, third, third], [0, 0, 0.5, 0.5], [0, 0, 0, 1], [0, 0, 0, 0]]
    keep = lower_triangle(4)
    assert_case(sdpa(*uniform(4), keep)[0, 0], lower)
    assert_case(sdpa(*uniform(4), ~keep)[0, 0], upper)
    padding = np.array([[False, False, True, True]])  # True = ignore, as other libraries write key padding
    out = sdpa(*uniform(4), keep & ~padding[:, None, None, :])
    assert_case(out[0, 0], [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]])
    for function in (sdpa, npattn.attention_weights, npattn.MultiHeadAttention.__call__):
        assert "True" in (function.__doc__ or ""), f"{function.__qualname__}: which way does its mask go?"


MASK_09 = {
    (5,): ([0.777297301, -0.060756716, 0.152473349], -1.7014744489),
    (1, 5): ([0.777297301, -0.060756716, 0.152473349], -1.7014744489),
    (4, 5): ([0.273700129, 0.636199023, 0.15276989], 6.3997584812),
    (4, 1): ([0.10898673, 0.255927064, -0.00212157769], -0.3708731823),
    (2, 1, 1, 5): ([-0.346704486, 0.271634153, 0.276788696], -3.4229083662),
    (3, 1, 5): ([0.296252423, 0.624531483, 0.102910714], 0.31906026976),
    (3, 4, 5): ([0.419028279, -0.0181887204, -0.415548339], -2.1774968748),
    (2, 1, 4, 5): ([0.689679518, 0.445237351, -0.0378840108], 2.679820337),
    (2, 3, 4, 5): ([-0.254009906, 0.107975847, -0.343817834], -2.432272915),
    (1, 3, 1, 1): ([0.10898673, 0.255927064, -0.00212157769], -0.3708731823),
    (): ([0.10898673, 0.255927064, -0.00212157769], -0.3708731823),
}


@pytest.mark.parametrize("shape", MASK_09)
def test_MASK_09(shape: tuple[int, ...]) -> None:
    query, key, value = filled_qkv((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8))
    row, total = MASK_09[shape]
    bias = 4 * pattern(shape, 29, 7)
    for argument in ("attn_mask", "bias"):
        out = sdpa(query, key, value, **{argument: bias})
        assert_case(out[1, 2, 3, :3], row)
        assert_case(out.sum(), total, digits=2e-8)
    masks = [bias.astype(dtype) for dtype in (np.float16, np.float32, np.float64)] + [bias > 0]
    for mask in masks:
        whole = np.ascontiguousarray(np.broadcast_to(mask, (2, 3, 4, 5)))
        expected = sdpa(query, key, value, whole)
        transposed = np.ascontiguousarray(np.asarray(mask).T).T
        for layout in (mask, np.broadcast_to(mask, (2, 3, 4, 5)), transposed):
            assert_same_bits(sdpa(query, key, value, layout), expected)


def test_MASK_09_trap() -> None:
    query, key = np.zeros((2, 2, 1, 2)), np.ones((2, 2, 3, 2))
    value = np.broadcast_to(np.eye(3), (2, 2, 3, 3))
    keep = np.array([[True, True, True], [True, False, False]])
    even, first = [1 / 3] * 3, [1, 0, 0]
    assert_case(sdpa(query, key, value, keep[:, None, None, :])[:, :, 0], [[even, even], [first, first]])
    assert_case(sdpa(query, key, value, keep[:, None, :])[:, :, 0], [[even, first], [even, first]])
