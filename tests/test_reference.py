"""The specification itself: against the second oracle, and where its text makes a promise."""

from __future__ import annotations

import inspect

import npattn
import numpy as np
import pure_python
import pytest
from npattn import reference
from tolerances import BFLOAT16

sdpa = reference.scaled_dot_product_attention
FUNCTIONS = [name for name in reference.__all__ if name != "AttentionSummary"]


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_the_public_functions(name):
    def keywords(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "out"]

    assert keywords(getattr(reference, name)) == keywords(getattr(npattn, name))


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
def test_attention_is_the_second_oracle(heads, is_causal, scale):
    query, key, value, bias = arrays((heads[0], 5, 6), (heads[1], 7, 6), (heads[1], 7, 3), (5, 7))
    mask = np.random.default_rng(1).random((5, 7)) < 0.7
    mask[3] = False
    keywords = {"is_causal": is_causal, "query_offset": 2, "scale": scale}
    expected = pure_python.attention(
        query.tolist(), key.tolist(), value.tolist(), mask.tolist(), bias=bias.tolist(), **keywords
    )
    found = sdpa(query, key, value, mask, bias=bias, return_weights=True, return_lse=True, **keywords)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)


def test_softmax_is_the_second_oracle():
    (x,) = arrays((6, 9))
    x[2], x[3, 4] = -np.inf, -np.inf
    for axis, rows in ((1, x), (0, x.T)):
        expected = np.array([pure_python.softmax(row.tolist()) for row in rows])
        found = reference.softmax(x, axis)
        np.testing.assert_allclose(found if axis else found.T, expected, rtol=1e-14, atol=0)
        expected = [pure_python.logsumexp(row.tolist()) for row in rows]
        np.testing.assert_allclose(reference.logsumexp(x, axis), expected, rtol=1e-14)
    np.testing.assert_allclose(np.exp(reference.log_softmax(x)), reference.softmax(x), rtol=1e-14)
    far = reference.log_softmax([[1e30, 1e30, -1e30], [-1e30, -1e30, -np.inf]])
    np.testing.assert_allclose(far, [[-np.log(2)] * 2 + [-2e30], [-np.log(2)] * 2 + [-np.inf]], rtol=1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_the_second_oracle(interleaved):
    (x,) = arrays((2, 3, 4, 8))
    places = np.array([0, 7, 123, -5])
    found, _ = reference.apply_rope(x, x, places, interleaved=interleaved)
    for row, turned in zip(x.reshape(-1, 8), found.reshape(-1, 8), strict=True):
        at = int(places[np.flatnonzero((x == row).all(-1))[0] % 4])
        expected = pure_python.rope(row.tolist(), at, interleaved=interleaved)
        np.testing.assert_allclose(turned, expected, rtol=0, atol=1e-14)
    cos, sin = reference.rope_cos_sin(places, 8)
    back = reference.rotary_embedding(found, cos, sin, interleaved=interleaved, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-14)
    seen = reference.rotary_embedding(
        x.swapaxes(1, 2), cos, sin, interleaved=interleaved, layout="BSHD"
    ).swapaxes(1, 2)
    np.testing.assert_array_equal(seen, found)


def test_split_and_concat_are_the_second_oracle():
    x = np.arange(24).reshape(4, 6)
    heads = reference.split_heads(x, 3)
    assert heads.tolist() == pure_python.split(x.tolist(), 3)
    assert reference.merge_heads(heads).tolist() == pure_python.concat(heads.tolist()) == x.tolist()
    assert np.shares_memory(heads, x)
    assert not np.shares_memory(reference.split_heads(x, 3, copy=True), x)


def test_hidden_keys_do_not_exist():
    query, key, value = arrays((2, 2, 4, 6), (2, 1, 9, 6), (2, 1, 9, 5))
    seen = [1, 2, 4]
    expected = sdpa(query, key[:, :, seen], value[:, :, seen], return_lse=True)
    hide = np.full((9,), -np.inf)
    hide[seen] = 0.0
    mask = hide == 0.0
    hidden = np.setdiff1d(np.arange(9), seen)
    key[:, :, hidden[::2]], value[:, :, hidden[1:]] = np.nan, np.inf
    for given in (
        (mask, None),
        (hide, None),
        (mask, np.zeros(9)),
        (None, hide),
        (np.where(mask, 0, -np.inf), hide),
    ):
        found = sdpa(query, key, value, given[0], bias=given[1], return_lse=True, return_weights=True)
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-14)
        np.testing.assert_allclose(found[2], expected[1], rtol=0, atol=1e-14)
        assert np.all(found[1][..., hidden] == 0.0)


def test_kv_lengths_window_and_causal_count_keys():
    query, key, value = np.zeros((2, 1, 6, 1)), np.ones((2, 1, 6, 1)), np.ones((2, 1, 6, 1))

    def counts(**keywords):
        weights = sdpa(query, key, value, return_weights=True, **keywords)[1]
        return (weights != 0).sum(-1)[:, 0].tolist()

    assert counts(is_causal=True) == [[1, 2, 3, 4, 5, 6]] * 2
    assert counts(is_causal=True, window=(2, None)) == [[1, 2, 3, 3, 3, 3]] * 2
    assert counts(window=(1, 2)) == [[3, 4, 4, 4, 3, 2]] * 2
    assert counts(window=(None, 0)) == counts(is_causal=True)
    assert counts(kv_lengths=[2, 0]) == [[2] * 6, [0] * 6]
    assert counts(is_causal=True, query_offset=[-1, 10]) == [[0, 1, 2, 3, 4, 5], [6] * 6]
    assert counts(is_causal=True, kv_lengths=3, window=(3, None)) == [[1, 2, 3, 3, 2, 1]] * 2


def test_rows_that_see_nothing():
    query, key, value = arrays((2, 3, 4), (2, 5, 4), (2, 5, 4))
    nothing = np.zeros(5, dtype=bool)
    output, weights, lse = sdpa(query, key, value, nothing, return_weights=True, return_lse=True)
    assert not output.any()
    assert not weights.any()
    assert np.all(lse == -np.inf)
    lse = sdpa(query, key, value, nothing, sinks=[0.5, -2.0], return_lse=True)[1]
    np.testing.assert_array_equal(lse, [[0.5] * 3, [-2.0] * 3])
    endless = sdpa(np.ones((1, 1)), np.full((2, 1), -np.inf), np.full((2, 1), np.nan), return_lse=True)
    assert endless[0].tolist() == [[0.0]]
    assert endless[1].tolist() == [-np.inf]


def test_visible_nan_stays_in_its_row():
    query, key, value = arrays((1, 4, 2), (1, 4, 2), (1, 4, 2))
    clean = sdpa(query, key, value, is_causal=True)
    broken = key.copy()
    broken[0, 2] = np.nan
    output, weights, lse = sdpa(query, broken, value, is_causal=True, return_weights=True, return_lse=True)
    np.testing.assert_array_equal(output[:, :2], clean[:, :2])
    assert np.isnan(output[:, 2:]).all()
    assert np.isnan(lse).tolist() == [[False, False, True, True]]
    assert np.isnan(weights[0, 2]).tolist() == [True, True, True, False]
    assert weights[0, 2, 3] == 0.0
    broken = value.copy()
    broken[0, 2, 0] = np.nan
    output = sdpa(query, key, broken, is_causal=True)
    assert np.isnan(output[0]).tolist() == [[False, False]] * 2 + [[True, False]] * 2


def test_options_in_their_order():
    query, key, value = np.array([[1.0]]), np.array([[2.0], [4.0], [100.0]]), np.eye(3)
    weights, lse = sdpa(query, key, value, [True, True, False], scale=1, softcap=2.0, return_lse=True)
    capped = 2 * np.tanh([1.0, 2.0])
    np.testing.assert_allclose(weights, [[*(np.exp(capped) / np.exp(capped).sum()), 0.0]], rtol=1e-14)
    np.testing.assert_allclose(lse, np.log(np.exp(capped).sum()), rtol=1e-14)
    stages = [
        reference.attention_scores(query, key, [0.0, 1.0, -np.inf], stage=stage, scale=1, softcap=2.0)
        for stage in ("scaled", "capped", "masked")
    ]
    np.testing.assert_array_equal(stages[0], [[2.0, 4.0, 100.0]])
    np.testing.assert_allclose(stages[1], [[*capped, 2.0]], rtol=1e-15)
    np.testing.assert_allclose(stages[2], [[capped[0], capped[1] + 1.0, -np.inf]], rtol=1e-15)
    scaled = reference.attention_scores(query[None], key[None], stage="scaled", scale=1, kv_lengths=2)
    np.testing.assert_array_equal(scaled, [[[2.0, 4.0, -np.inf]]])


def test_the_sink_is_one_more_key_of_no_value():
    query, key, value = arrays((2, 4, 3, 6), (2, 2, 5, 6), (2, 2, 5, 4))
    sinks = np.array([0.5, 100.0, -np.inf, 0.0])
    output, weights, lse = sdpa(query, key, value, sinks=sinks, return_weights=True, return_lse=True)
    scores = reference.attention_scores(query, key)
    extended = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (2, 4, 3, 1))], axis=-1)
    np.testing.assert_allclose(weights, reference.softmax(extended)[..., :-1], rtol=1e-13)
    np.testing.assert_allclose(lse, reference.logsumexp(extended), rtol=1e-14)
    np.testing.assert_allclose(output, weights @ np.repeat(value, 2, axis=1), rtol=1e-12)
    np.testing.assert_allclose(reference.softmax(scores, sinks=sinks[:, None]), weights, rtol=1e-14, atol=0)


def test_alibi_is_a_bias():
    query, key, value = arrays((2, 4, 3, 6), (2, 4, 5, 6), (2, 4, 5, 4))
    slopes = np.array([0.5, 0.25, 0.125, 1.0])
    distance = np.abs(np.arange(3)[:, None] + 2 - np.arange(5))
    expected = sdpa(query, key, value, bias=-slopes[:, None, None] * distance)
    np.testing.assert_array_equal(sdpa(query, key, value, alibi_slopes=slopes, query_offset=2), expected)
    per_batch = np.stack([slopes, 2 * slopes])
    found = sdpa(query, key, value, alibi_slopes=per_batch, query_offset=[2, 2])
    np.testing.assert_array_equal(found[0], expected[0])
    assert not np.array_equal(found[1], expected[1])


def test_offset_is_never_guessed():
    query, key, value = arrays((3, 2), (5, 2), (5, 2))
    for keywords in ({"is_causal": True}, {"window": (1, 1)}, {"alibi_slopes": [1.0]}):
        with pytest.raises(ValueError, match=r"query_offset .*0 \(upper left\) or 2 \(lower right\)"):
            sdpa(query, key, value, **keywords)
        assert sdpa(query, key, value, query_offset=2, **keywords).shape == (3, 2)
    assert sdpa(query, key, value).shape == (3, 2)


def test_layouts_leading_axes_and_dtypes():
    query, key, value = arrays((2, 3, 4, 5, 6), (3, 2, 7, 6), (2, 1, 2, 7, 3))
    output, weights, lse = sdpa(query, key, value, return_weights=True, return_lse=True)
    assert (output.shape, weights.shape, lse.shape) == ((2, 3, 4, 5, 3), (2, 3, 4, 5, 7), (2, 3, 4, 5))
    swapped = sdpa(*(x.swapaxes(-2, -3) for x in (query, key, value)), layout="BSHD", return_lse=True)
    np.testing.assert_array_equal(swapped[0].swapaxes(-2, -3), output)
    np.testing.assert_array_equal(swapped[1], lse)
    one = sdpa(query[0, 0, 0], key[0, 0], value[0, 0, 0], return_weights=True)
    np.testing.assert_allclose(one[0], output[0, 0, 0], rtol=0, atol=1e-14)
    assert one[1].shape == (5, 7)
    np.testing.assert_allclose(reference.attention_weights(query, key)[1, 2], weights[1, 2], rtol=1e-14)
    half = sdpa(query.astype(BFLOAT16), key.astype(np.float16), np.ones((2, 7, 3), dtype=int))
    assert half.dtype == np.float64


def test_varlen_is_a_loop():
    query, key, value = arrays((5, 4, 6), (9, 2, 6), (9, 2, 3))
    cu_q, cu_k = np.array([0, 0, 1, 1, 3, 5], dtype=np.int32), np.array([0, 3, 5, 5, 9, 9], dtype=np.int64)
    offsets = np.diff(cu_k) - np.diff(cu_q)
    output, lse = reference.varlen_attention(
        query, key, value, cu_q, cu_k, is_causal=True, query_offset=offsets, return_lse=True
    )
    assert (output.shape, lse.shape) == ((5, 4, 3), (4, 5))
    alone = sdpa(
        query[1:3].swapaxes(0, 1), key[5:9].swapaxes(0, 1), value[5:9].swapaxes(0, 1),
        is_causal=True, query_offset=2, return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(output[1:3].swapaxes(0, 1), alone[0], rtol=0, atol=1e-15)
    np.testing.assert_allclose(lse[:, 1:3], alone[1], rtol=0, atol=1e-15)
    assert not output[3:].any()
    assert np.all(lse[:, 3:] == -np.inf)


def test_merge_is_the_whole():
    query, key, value = arrays((2, 3, 6), (2, 9, 6), (2, 9, 4))
    whole = sdpa(query, key, value, sinks=[0.3, -1.0], return_lse=True)
    parts = [
        sdpa(query, key[:, s], value[:, s], sinks=[0.3, -1.0] if s.start == 0 else None, return_lse=True)
        for s in (slice(0, 4), slice(4, 4), slice(4, 9))
    ]
    for order in (parts, parts[::-1]):
        merged = reference.merge_attention(*zip(*order, strict=True))
        for ours, theirs in zip(merged, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)
    nothing = reference.merge_attention([np.full((2, 3), np.nan)] * 2, [[-np.inf] * 2] * 2)
    assert not nothing[0].any()
    assert np.all(nothing[1] == -np.inf)


def test_summary():
    query, key = arrays((2, 3, 6), (2, 4, 6))
    weights = reference.attention_weights(query, key, is_causal=True, query_offset=0)
    summary = reference.attention_summary(query, key, is_causal=True, query_offset=0, top_k=3)
    np.testing.assert_allclose(summary.received, weights.sum(1), rtol=1e-14)
    assert summary.top_keys[0, 0].tolist() == [0, -1, -1]
    assert sorted(summary.top_keys[1, 2].tolist()) == [0, 1, 2]
    assert np.all(np.diff(summary.top_weights, axis=-1) <= 0)
    np.testing.assert_allclose(summary.entropy[:, 0], 0.0, atol=1e-15)
    w = weights[1, 2, :3]
    np.testing.assert_allclose(summary.entropy[1, 2], -(w * np.log(w)).sum(), rtol=1e-14)
    even = reference.attention_summary(np.zeros((4, 2)), np.zeros((3, 2)))
    assert even.top_keys.tolist() == [[0, 1, 2]] * 4
    np.testing.assert_allclose(even.entropy, np.log(3), rtol=1e-14)


def test_warnings_are_left_as_they_were():
    before = np.geterr()
    reference.softmax([np.inf, np.nan, -np.inf])
    reference.attention_summary(np.full((2, 2), np.inf), np.zeros((2, 2)))
    assert np.geterr() == before
