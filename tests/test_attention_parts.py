"""What goes beyond one dense call: packed sequences, partial results, weights, scores and summaries."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import Array, layouts_of
from support import DTYPES, assert_same_bits, assert_within, random_qkv, tolerances_of
from tolerances import largest, tolerance

pytestmark = pytest.mark.usefixtures("isa")
INF = np.inf
LENGTHS = [0, 5, 1, 0, 70, 17, 1, 3]


def packed(dtype: Any = np.float32, heads: tuple[int, int] = (4, 2)) -> tuple[tuple[Array, ...], Array]:
    """Sequences of LENGTHS tokens one behind the other: query, key, value (T, H, E) and cu_seqlens."""
    total = sum(LENGTHS)
    arrays = random_qkv((), heads, (total, total), (24, 16), dtype)
    return tuple(array.swapaxes(0, 1) for array in arrays), np.cumsum([0, *LENGTHS])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 1), "softcap": 2.0}], ids=str)
def test_varlen_is_a_loop(dtype: str, options: dict[str, Any]) -> None:
    (query, key, value), cu = packed(DTYPES[dtype])
    out, lse = npattn.varlen_attention(query, key, value, cu, **options, return_lse=True)
    assert out.shape == (sum(LENGTHS), 4, 16)
    assert lse.shape == (4, sum(LENGTHS))
    within = tolerances_of(query, key, value, layout="BSHD")
    for start, stop in pairwise(cu):
        part = [array[start:stop] for array in (query, key, value)]
        if stop > start:
            one, one_lse = sdpa(*part, **options, layout="BSHD", return_lse=True)
            assert_within(out[start:stop], one, 2 * within.output)
            assert_within(lse[:, start:stop], one_lse, 2 * within.lse)


def test_varlen_index_dtypes_and_layouts() -> None:
    arrays, cu = packed()
    expected = npattn.varlen_attention(*arrays, cu, is_causal=True)
    for dtype in (np.int32, np.int64, np.uint32, np.int16):
        assert_same_bits(npattn.varlen_attention(*arrays, cu.astype(dtype), is_causal=True), expected)
    assert_same_bits(npattn.varlen_attention(*arrays, cu.tolist(), cu.tolist(), is_causal=True), expected)
    for name, moved in layouts_of(arrays[1]):
        again = npattn.varlen_attention(arrays[0], moved, arrays[2], cu, is_causal=True)
        assert np.array_equal(again, expected), name
    for count in (1, 2, 3):
        with npattn.threads(count):
            assert_same_bits(npattn.varlen_attention(*arrays, cu, is_causal=True), expected)
    query = arrays[0].copy()
    square = [query, arrays[1][:, [0, 0, 1, 1]], arrays[2][:, [0, 0, 1, 1]]]
    wide = npattn.varlen_attention(*square, cu)
    out = np.empty_like(wide)
    assert npattn.varlen_attention(*square, cu, out=out) is out
    assert_same_bits(out, wide)


def test_varlen_sequences_do_not_bleed() -> None:
    arrays, cu = packed()
    expected, lse = npattn.varlen_attention(*arrays, cu, return_lse=True)
    for start, stop in pairwise(cu):
        dirty = [array.copy() for array in arrays]
        for array in dirty:
            array[:start], array[stop:] = np.nan, np.nan
        again, again_lse = npattn.varlen_attention(*dirty, cu, return_lse=True)
        assert_same_bits(again[start:stop], expected[start:stop])
        assert_same_bits(again_lse[:, start:stop], lse[:, start:stop])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_of_any_split(dtype: str) -> None:
    query, key, value = random_qkv((2,), (4, 2), (9, 60), (16, 12), DTYPES[dtype])
    out, lse = sdpa(query, key, value, return_lse=True)
    within = tolerances_of(query, key, value)
    for borders in ((0, 60), (0, 0, 60), (0, 1, 60), (0, 20, 40, 60), (0, 7, 7, 30, 59, 60, 60), range(61)):
        parts = [sdpa(query, key[:, :, a:b], value[:, :, a:b], return_lse=True) for a, b in pairwise(borders)]
        outputs, lses = zip(*parts, strict=True)
        merged, merged_lse = npattn.merge_attention(outputs, lses)
        assert merged.dtype == DTYPES[dtype]
        assert_within(merged, out, 2 * within.output)
        assert_within(merged_lse, lse, 2 * within.lse)
        backwards, backwards_lse = npattn.merge_attention(outputs[::-1], lses[::-1])
        assert_within(backwards, merged, within.output)
        assert_within(backwards_lse, merged_lse, within.lse)
        one_by_one = reduce(lambda a, b: npattn.merge_attention([a[0], b[0]], [a[1], b[1]]), parts)
        assert_within(one_by_one[0], merged, within.output)


def test_merge_of_one_query_without_axes() -> None:
    """Parts (Ev,) with an lse (): arrays come back, as they do for any shape."""
    for dtype in (np.float32, np.float64):
        parts, lses = np.array([[1.0, 2.0], [3.0, 4.0]], dtype), np.zeros(2, dtype)
        output, lse = npattn.merge_attention(parts, lses)
        assert type(output) is type(lse) is np.ndarray
        assert (output.tolist(), output.dtype, lse.shape, lse.dtype) == ([2.0, 3.0], dtype, (), dtype)
        assert_within(lse, np.log(2.0), 1e-7)


def test_merge_of_nothing_and_sinks() -> None:
    query, key, value = random_qkv((), (4, 4), (3, 20), (8, 8), np.float64)
    nothing, no_lse = sdpa(query, key, value, kv_lengths=0, return_lse=True)
    merged, merged_lse = npattn.merge_attention([nothing, nothing], [no_lse, no_lse])
    assert not merged.any()
    assert (merged_lse == -INF).all()
    poisoned = np.full_like(nothing, np.nan)  # a part with lse -inf adds nothing, whatever it holds
    out, lse = sdpa(query, key, value, return_lse=True)
    merged, merged_lse = npattn.merge_attention([out, poisoned], [lse, no_lse])
    assert_within(merged, out, 1e-15)
    assert_within(merged_lse, lse, 1e-15)
    sinks = np.array([0.5, 2.0, -INF, 0.0])
    expected, expected_lse = sdpa(query, key, value, sinks=sinks, return_lse=True)
    first = sdpa(query, key[:, :7], value[:, :7], sinks=sinks, return_lse=True)
    second = sdpa(query, key[:, 7:], value[:, 7:], return_lse=True)
    merged, merged_lse = npattn.merge_attention([first[0], second[0]], [first[1], second[1]])
    assert_within(merged, expected, 1e-14)
    assert_within(merged_lse, expected_lse, 1e-14)
    far = npattn.merge_attention([out, out], [lse, lse + 2000])
    assert_within(far[0], out, 1e-15)
    assert_within(far[1], lse + 2000, 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_scores(dtype: str) -> None:
    query, key, value = random_qkv((2,), (4, 2), (9, 40), (16, 12), DTYPES[dtype])
    within = tolerances_of(query, key, value)
    weights = npattn.attention_weights(query, key)
    scores = npattn.attention_scores(query, key)
    assert (weights.dtype, scores.dtype) == (DTYPES[dtype], DTYPES[dtype])
    assert_within(weights.astype(np.float64).sum(-1), np.ones((2, 4, 9)), 40 * within.weights)
    rounded = largest(scores) * tolerance(DTYPES[dtype])  # the scores came back in their dtype
    assert_within(npattn.softmax(scores.astype(np.float64)), weights, within.weights + 2 * rounded)
    assert_same_bits(npattn.attention_scores(query, key, stage="masked"), scores)
    swapped = [array.swapaxes(1, 2) for array in (query, key)]
    assert_same_bits(npattn.attention_weights(*swapped, layout="BSHD"), weights)
    assert npattn.attention_weights(query[0, 0], key[0, 0]).shape == (9, 40)
    with pytest.raises(ValueError, match=r"(?s)stage.*scaled.*capped.*masked"):
        npattn.attention_scores(query, key, stage="raw")


def test_summary() -> None:
    query, key, _ = random_qkv((2,), (4, 2), (33, 300), (16, 16))
    weights = npattn.attention_weights(query, key, is_causal=True, query_offset=-3)
    summary = npattn.attention_summary(query, key, is_causal=True, query_offset=-3, top_k=4)
    assert summary.entropy.shape == (2, 4, 33)
    assert summary.top_weights.shape == summary.top_keys.shape == (2, 4, 33, 4)
    assert summary.received.shape == (2, 4, 300)
    assert np.issubdtype(summary.top_keys.dtype, np.integer)
    assert (np.diff(summary.top_weights, axis=-1) <= 0).all()
    assert_within(summary.received, weights.sum(-2), 1e-5)
    assert_within(summary.top_weights, np.sort(weights, axis=-1)[..., ::-1][..., :4], 1e-6)
    assert (summary.top_keys[:, :, :3] == -1).all()  # the first three queries see no key
    assert not summary.entropy[:, :, :4].any()  # nor is the fourth in doubt: it sees one
    assert (summary.top_keys[:, :, 3] == [0, -1, -1, -1]).all()
    few = npattn.attention_summary(query[0, 0, :5], key[0, 0, :3], top_k=5)
    assert few.top_keys.shape == (5, 3)
    exact = reference.attention_summary(query[0, 0, :5], key[0, 0, :3], top_k=5)
    assert (few.top_keys == exact.top_keys).all()
    even = npattn.attention_summary(np.zeros((1, 8)), np.ones((64, 8)))
    assert_within(even.entropy, [np.log(64)], 1e-6)
    assert even.top_keys.tolist() == [[0, 1, 2, 3, 4]]
    for bad in (0, -1):
        with pytest.raises(ValueError, match="top_k"):
            npattn.attention_summary(query, key, top_k=bad)
