"""Recorded faults of other systems: combined masks, dropped options, windows, softcap, sinks, ALiBi."""

from __future__ import annotations

from itertools import product

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from support import DTYPES, assert_case, assert_close, filled_qkv, uniform
from tolerances import CASES

pytestmark = pytest.mark.usefixtures("isa")
INF = np.inf
THIRD = 1 / 3
CAUSAL_4 = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [THIRD, THIRD, THIRD, 0], [0.25] * 4]


def test_MASK_10() -> None:
    causal = np.tril(np.ones((5, 5), bool))
    padding = np.arange(5) == 4
    expected = [[*CAUSAL_4[i], 0] for i in range(4)] + [[0.25, 0.25, 0.25, 0.25, 0]]

    def kinds(keep: np.ndarray) -> list[np.ndarray]:
        low = np.where(keep, 0.0, np.finfo(np.float32).min)
        return [keep, np.where(keep, 0.0, -INF), low, low.astype(np.float32)]

    for causal_mask, padding_mask in product(kinds(causal), kinds(~padding)):
        masks = [causal_mask, padding_mask]
        boolean = [mask for mask in masks if mask.dtype == bool]
        floats = [mask for mask in masks if mask.dtype != bool]
        if len(boolean) == 2:
            options = {"attn_mask": boolean[0] & boolean[1]}
        elif boolean:
            options = {"attn_mask": boolean[0], "bias": floats[0]}
        else:
            options = {"attn_mask": floats[0], "bias": floats[1]}
        out, weights = sdpa(*uniform(5), **options, return_weights=True)
        assert_case(out[0, 0], expected)
        assert_case(weights.sum(-1), np.ones((1, 1, 5)))
    for shape in ((5, 5), (1, 5, 5), (1, 1, 5, 5)):
        assert_case(sdpa(*uniform(5), (causal & ~padding).reshape(shape))[0, 0], expected)
    with pytest.raises(TypeError, match="bias"):
        sdpa(*uniform(5), bias=causal)


def test_MASK_10_layer() -> None:
    causal = np.tril(np.ones((5, 5), bool))
    padding = np.arange(5) == 4
    expected = [[*CAUSAL_4[i], 0] for i in range(4)] + [[0.25, 0.25, 0.25, 0.25, 0]]
    identity, nothing = np.eye(5), np.zeros((5, 5))
    layer = npattn.MultiHeadAttention(nothing, identity, identity, identity, num_heads=1)
    hidden = np.where(padding, -INF, 0.0)
    for options in (
        {"attn_mask": causal & ~padding},
        {"attn_mask": causal, "bias": hidden},
        {"attn_mask": np.where(causal, 0.0, -INF), "bias": hidden},
        {"attn_mask": ~padding, "is_causal": True},
        {"attn_mask": hidden, "is_causal": True},
    ):
        out, weights = layer(np.eye(5)[None], **options, return_weights=True)
        assert_case(out[0], expected)
        assert_case(weights[0, 0], expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_MASK_11(dtype: str) -> None:
    arrays = uniform(4, DTYPES[dtype])
    rows, all_true, no_bias = [array[0] for array in arrays], np.ones((4, 4), bool), np.zeros((4, 4))
    assert_case(sdpa(*arrays, is_causal=True)[0, 0], CAUSAL_4)
    assert_case(sdpa(*rows, is_causal=True)[0], CAUSAL_4)
    assert_case(sdpa(*arrays, is_causal=True, bias=no_bias)[0, 0], CAUSAL_4)
    assert_case(sdpa(*arrays, all_true, is_causal=True)[0, 0], CAUSAL_4)
    assert_case(sdpa(*arrays, is_causal=True, return_lse=True)[0][0, 0], CAUSAL_4)
    out, weights = sdpa(*arrays, is_causal=True, return_weights=True)
    out_3d, weights_3d, lse_3d = sdpa(*rows, is_causal=True, return_weights=True, return_lse=True)
    for result in (out[0, 0], weights[0, 0], out_3d[0], weights_3d[0]):
        assert_case(result, CAUSAL_4)
        assert not np.triu(result.astype(np.float64), 1).any()
    assert_close(lse_3d[0], np.log([1, 2, 3, 4]), max(CASES[lse_3d.dtype], 3e-6))


def test_MASK_13() -> None:
    query, key = np.zeros((1, 1, 6, 2)), np.ones((1, 1, 6, 2))
    value = np.arange(6.0).reshape(1, 1, 6, 1)
    answers = {2: [0, 0.5, 1, 2, 3, 4], 3: [0, 0.5, 1, 1.5, 2.5, 3.5], 0: [0, 1, 2, 3, 4, 5]}
    for left, expected in answers.items():
        for options in ({"window": (left, None), "is_causal": True}, {"window": (left, 0)}):
            out, weights = sdpa(query, key, value, **options, return_weights=True)
            assert_case(out[0, 0, :, 0], expected)
            visible = np.minimum(np.arange(6) + 1, left + 1)
            assert (np.count_nonzero(weights[0, 0], axis=-1) == visible).all()
            last_two = sdpa(query[:, :, 4:], key, value, **options, query_offset=4)
            assert_case(last_two[0, 0, :, 0], expected[4:])
    wide = sdpa(query, key, value, window=(6, 6))
    assert_case(wide[0, 0, :, 0], [2.5] * 6)
    _, weights = sdpa(query, key, value, window=(2, 2), is_causal=True, return_weights=True)
    assert not np.triu(weights[0, 0], 1).any()
    assert "window" in (sdpa.__doc__ or "")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_MASK_14(dtype: str) -> None:
    query = np.array([[1.0]], DTYPES[dtype])
    key = np.array([[2.0], [4.0], [100.0]], DTYPES[dtype])
    value = np.eye(3, dtype=DTYPES[dtype])
    keep = np.array([True, True, False])
    out, weights, lse = sdpa(
        query, key, value, keep, scale=1, softcap=2.0, return_weights=True, return_lse=True
    )
    assert_case(out[0], [0.400143591, 0.599856409, 0])
    assert weights[0, 2] == 0
    assert_case(lse[0], 2.439120131)
    out = sdpa(query, key[:2], value[:2, :2], scale=1, softcap=2.0, bias=np.array([1.0, 0.0]))
    assert_case(out[0], [0.64454206, 0.35545794])
    plain = sdpa(query, key, value, keep, scale=1)
    assert_close(sdpa(query, key, value, keep, scale=1, softcap=1e6), plain, 1e-6)
    assert (sdpa(query, key, value, keep, scale=1, softcap=0) == plain).all()
    with pytest.raises(ValueError, match="softcap"):
        sdpa(query, key, value, softcap=-1.0)
    _, weights = sdpa(*uniform(4), is_causal=True, softcap=2.0, return_weights=True)
    assert not np.triu(weights[0, 0], 1).any()


MASK_15 = {
    0.5: ([0.1863237232, 0.5064803911], 1.68026967064),
    0.0: ([0.2119415576, 0.5761168848], 1.55144471393),
    -3.0: ([0.2653879288, 0.7213991843], 1.32656264127),
    100.0: ([3.720075976e-44, 1.011221493e-43], 100.0),
    -INF: ([0.2689414214, 0.7310585786], 1.313261688),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_MASK_15(dtype: str) -> None:
    one, keys, eye = np.ones((1, 1)), np.array([[0.0], [1.0]]), np.eye(2)
    query, key, value = (array.astype(DTYPES[dtype])[None] for array in (one, keys, eye))
    for sink, (expected, expected_lse) in MASK_15.items():
        out, weights, lse = sdpa(
            query, key, value, scale=1, sinks=np.array([sink]), return_weights=True, return_lse=True
        )
        assert_case(out[0, 0], expected)
        assert_case(weights[0, 0], expected)
        assert_case(lse[0, 0], expected_lse)
        if dtype == "float64" and sink == 100.0:
            np.testing.assert_allclose(weights[0, 0], expected, rtol=1e-9)
    keep = np.zeros((1, 2), bool)
    out, lse = sdpa(query, key, value, keep, scale=1, sinks=np.array([0.5]), return_lse=True)
    assert not out.any()
    assert lse[0, 0] == 0.5
    sinks = np.array([0.5, 100.0, -INF, 0.0])
    out, lse = sdpa(
        np.repeat(query, 4, 0),
        np.repeat(key, 2, 0),
        np.repeat(value, 2, 0),
        scale=1,
        sinks=sinks,
        return_lse=True,
    )
    for head, sink in enumerate(sinks):
        assert_case(out[head, 0], MASK_15[sink][0])
        assert_case(lse[head, 0], MASK_15[sink][1])


@pytest.mark.parametrize("key_len", [1, 64, 65, 1000])
@pytest.mark.parametrize("query_len", [1, 40])
def test_MASK_15_counted_once(key_len: int, query_len: int) -> None:
    query = np.zeros((2, query_len, 8), np.float32)
    key, value = np.ones((2, key_len, 8), np.float32), np.ones((2, key_len, 8), np.float32)
    sinks = np.array([0.0, 1e4])
    for threads in (1, 2, 3):
        with npattn.threads(threads):
            out, lse = sdpa(query, key, value, sinks=sinks, return_lse=True)
        assert_case(out[0], np.full((query_len, 8), key_len / (key_len + 1)))
        assert_case(lse[0], np.full(query_len, np.log(key_len + 1)))
        assert not out[1].any()
        assert (lse[1] == 1e4).all()


MASK_17 = {
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [2.0**-i for i in range(1, 9)],
    10: [*[2.0**-i for i in range(1, 9)], 0.70710678, 0.35355339],
    12: [*[2.0**-i for i in range(1, 9)], 0.70710678, 0.35355339, 0.1767767, 0.088388348],
}


def test_MASK_17() -> None:
    for heads, expected in MASK_17.items():
        assert_case(npattn.alibi_slopes(heads), expected)
    assert npattn.alibi_slopes(16).dtype == np.float64
    assert (npattn.alibi_slopes(16) == 2.0 ** (-np.arange(1, 17) / 2)).all()
    query, key = np.zeros((6, 1, 2)), np.ones((6, 5, 2))
    value = np.broadcast_to(np.arange(5.0)[:, None], (6, 5, 1))
    slopes = npattn.alibi_slopes(6)
    out, weights = sdpa(query, key, value, alibi_slopes=slopes, query_offset=4, return_weights=True)
    assert_case(weights[0, 0], [0.114050724, 0.146444028, 0.188037854, 0.241445384, 0.31002201])
    assert_case(out[0, 0, 0], 2.486943928)

    query, key, value = filled_qkv((1, 6, 9, 8), (1, 6, 9, 8), (1, 6, 9, 8))
    full = sdpa(query, key, value, is_causal=True, alibi_slopes=slopes)
    step = sdpa(query[:, :, 8:], key, value, is_causal=True, alibi_slopes=slopes, query_offset=8)
    assert_close(step, full[:, :, 8:], 1e-12)
    for heads, length in ((2, 5), (6, 9), (3, 4)):
        arrays = filled_qkv(*[(heads, length, 8)] * 3)
        expected = reference.scaled_dot_product_attention(*arrays, alibi_slopes=npattn.alibi_slopes(heads))
        assert_close(sdpa(*arrays, alibi_slopes=npattn.alibi_slopes(heads)), expected, 1e-12)
