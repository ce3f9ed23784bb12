"""Hidden keys never influence a result, whatever lies there; visible NaN stay in the rows that see them."""

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
INF, NAN = np.inf, np.nan
POISONS = {"nan": NAN, "inf": INF, "-inf": -INF, "garbage": 3e4}

# name: (kv heads, query length, key length), four query heads
PATHS = {
    "prefill": (2, 40, 300),
    "decode": (4, 1, 700),
    "group": (1, 3, 40),
    "few_rows": (4, 5, 40),
    "tiny": (4, 2, 6),
}


def arrays_of(path: str, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    kv_heads, query_len, key_len = PATHS[path]
    return random_qkv((2,), (4, kv_heads), (query_len, key_len), (20, 12), dtype)


def hiding_options(query_len: int, key_len: int) -> dict[str, tuple[dict[str, Any], Array]]:
    """name: (keywords, the keys (key_len,) that no query sees under them)."""
    j = np.arange(key_len)
    some = (j % 5 == 1) | (j > key_len - 3)
    last = j >= key_len - 3
    offset = key_len - query_len - 3
    hidden_float = np.where(some, -INF, 0.5).astype(np.float32)
    early = j < key_len - query_len - 4
    return {
        "bool mask": ({"attn_mask": ~some}, some),
        "expanded bool mask": (
            {"attn_mask": np.broadcast_to(~some, (2, 4, query_len, key_len)).copy()},
            some,
        ),
        "float mask": ({"attn_mask": hidden_float}, some),
        "bias": ({"bias": hidden_float}, some),
        "bias beside a mask": ({"bias": hidden_float, "attn_mask": j % 2 == 0}, some | (j % 2 == 1)),
        "causal": ({"is_causal": True, "query_offset": offset}, last),
        "window": ({"window": (4, 0), "query_offset": key_len - query_len}, early),
        "window and sinks": ({"window": (1, 2), "query_offset": offset - 2, "sinks": np.zeros(4)}, last),
        "lengths": ({"kv_lengths": max(key_len - 3, 0)}, last),
        "lengths per batch": ({"kv_lengths": np.array([0, key_len - 3])}, last),
        "softcap and ALiBi": (
            {"attn_mask": ~some, "softcap": 2.0, "alibi_slopes": np.full(4, 0.1), "query_offset": offset},
            some,
        ),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_behind_hidden_keys(path: str, dtype: str) -> None:
    query, key, value = arrays_of(path, DTYPES[dtype])
    for name, (options, hidden) in hiding_options(*PATHS[path][1:]).items():
        expected = sdpa(query, key, value, **options, return_weights=True, return_lse=True)
        for poison in POISONS.values():
            bad_key, bad_value = key.copy(), value.copy()
            bad_key[..., hidden, :] = poison
            bad_value[..., hidden, :] = poison
            for arrays in ((bad_key, value), (key, bad_value), (bad_key, bad_value)):
                actual = sdpa(query, *arrays, **options, return_weights=True, return_lse=True)
                try:
                    for got, wanted in zip(actual, expected, strict=True):
                        assert_same_bits(got, wanted)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {poison}") from error
        assert np.isfinite(expected[0].astype(np.float64)).all()
        assert not expected[1].astype(np.float64)[..., hidden].any()


@pytest.mark.parametrize("path", PATHS)
def test_poison_in_what_is_added_to_hidden_keys(path: str) -> None:
    query, key, value = arrays_of(path)
    query_len, key_len = PATHS[path][1:]
    hidden = np.arange(key_len) % 3 == 1
    clean = np.zeros((query_len, key_len), np.float32)
    expected = sdpa(query, key, value, ~hidden, bias=clean)
    for poison in POISONS.values():
        dirty = clean.copy()
        dirty[:, hidden] = poison
        assert_same_bits(sdpa(query, key, value, ~hidden, bias=dirty), expected)
    lengths = key_len - 2
    dirty = np.zeros((query_len, key_len), np.float32)
    dirty[:, lengths:] = NAN
    expected = sdpa(query, key, value, kv_lengths=lengths)
    for options in ({"bias": dirty}, {"attn_mask": dirty}):
        assert_within(sdpa(query, key, value, **options, kv_lengths=lengths), expected, 1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_visible_nan_stays_in_its_rows(path: str, dtype: str, place: str) -> None:
    query, key, value = arrays_of(path, DTYPES[dtype])
    query_len, key_len = PATHS[path][1:]
    options = {"is_causal": True, "query_offset": key_len - query_len}
    bad_key = key_len - 1 - query_len // 2
    arrays = {"query": query, "key": key, "value": value}
    clean = sdpa(query, key, value, **options)
    arrays[place] = arrays[place].copy()
    row = query_len // 2
    if place == "query":
        arrays[place][0, 1, row, 3] = NAN
    else:
        arrays[place][0, 0, bad_key, 3] = NAN
    out, weights = sdpa(**arrays, **options, return_weights=True)
    expected = reference.scaled_dot_product_attention(**arrays, **options)
    within = tolerances_of(query, key, value)
    assert np.isnan(expected).any()
    assert_within(out, expected, within.output)
    untouched = ~np.isnan(expected).any(-1)
    assert_same_bits(out[untouched], clean[untouched])
    above = np.arange(key_len) > np.arange(query_len)[:, None] + key_len - query_len
    assert not weights.astype(np.float64)[..., above].any()


@pytest.mark.parametrize("path", PATHS)
def test_visible_infinities(path: str) -> None:
    """+inf in a score makes its row NaN; -inf there is no key; an infinite value reaches its own column."""
    query, key, value = (array.astype(np.float64) for array in arrays_of(path))
    key_len = PATHS[path][2]
    query[...] = np.abs(query)
    for poison in (INF, -INF):
        bad = key.copy()
        bad[:, :, key_len // 2, 0] = poison
        out, lse = sdpa(query, bad, value, return_lse=True)
        assert_within(out, reference.scaled_dot_product_attention(query, bad, value), 1e-12)
        assert np.isfinite(lse).all() if poison < 0 else not np.isfinite(lse).any()
        bad_value = value.copy()
        bad_value[:, :, key_len // 2, 2] = poison
        out = sdpa(query, key, bad_value)
        assert (out[..., 2] == poison).all()
        assert np.isfinite(np.delete(out, 2, axis=-1)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(path: str, dtype: str) -> None:
    query, key, value = arrays_of(path, DTYPES[dtype])
    query_len, key_len = PATHS[path][1:]
    nothing = np.zeros((query_len, key_len), bool)
    all_low = np.full((query_len, key_len), -INF)
    empty_ways: list[dict[str, Any]] = [
        {"attn_mask": nothing},
        {"attn_mask": all_low},
        {"bias": all_low},
        {"kv_lengths": 0},
        {"is_causal": True, "query_offset": -query_len},
        {"window": (0, 0), "query_offset": key_len + 5},
        {"window": (3, 0), "query_offset": -query_len},
    ]
    for options in empty_ways:
        out, weights, lse = sdpa(query, key, value, **options, return_weights=True, return_lse=True)
        assert not out.astype(np.float64).any(), options
        assert not weights.astype(np.float64).any(), options
        assert (lse == -INF).all(), options
        sinks = np.array([0.5, -INF, 3.0, -1.0])
        out, lse = sdpa(query, key, value, **options, sinks=sinks, return_lse=True)
        assert not out.astype(np.float64).any(), options
        assert_same_bits(lse, np.broadcast_to(sinks[:, None].astype(lse.dtype), lse.shape)), options
        out = np.full_like(out, 7)
        sdpa(query, key, value, **options, out=out)
        assert not out.astype(np.float64).any(), options


@pytest.mark.parametrize("path", PATHS)
def test_visible_scores_of_minus_infinity(path: str) -> None:
    """A query whose visible scores are all -inf gives zeros, as one that sees no key does."""
    query, key, value = arrays_of(path)
    query = np.abs(query)
    key = np.broadcast_to(np.float32(-INF), key.shape)
    out, weights, lse = sdpa(query, key, value, return_weights=True, return_lse=True)
    assert not out.any()
    assert not weights.any()
    assert (lse == -INF).all()


@pytest.mark.parametrize("path", PATHS)
def test_finite_masks_are_arithmetic(path: str) -> None:
    """finfo.min added to every key of a row leaves a softmax of equal scores: all digits are gone."""
    query, key, value = arrays_of(path)
    query_len, key_len = PATHS[path][1:]
    low = np.finfo(np.float32).min
    mask = np.full((query_len, key_len), low, np.float32)
    out = sdpa(query, key, value, mask)
    assert_within(out, reference.scaled_dot_product_attention(query, key, value, mask), 2e-6)
    assert np.isfinite(out).all()
    for beyond in (-1e300, np.finfo(np.float64).min):  # finite, though float32 cannot hold it
        far = np.full((query_len, key_len), beyond)
        for argument in ("attn_mask", "bias"):
            out = sdpa(query, key, value, **{argument: far})
            exact = reference.scaled_dot_product_attention(query, key, value, far)
            assert_within(out, exact, 2e-6)
    mask[:, : key_len // 2] = 0.0
    out, weights = sdpa(query, key, value, mask, return_weights=True)
    assert not weights[..., key_len // 2 :].any()
    half = [array[..., : key_len // 2, :] for array in (key, value)]
    assert_within(out, reference.scaled_dot_product_attention(query, *half), 2e-6)
    both = sdpa(query, key, value, mask, bias=mask)
    assert_within(both, reference.scaled_dot_product_attention(query, *half), 2e-6)


def test_uninitialised_memory_past_the_lengths() -> None:
    """The rows past kv_lengths are never read: not even from pages that were never written."""
    query, key, value = random_qkv((3,), (4, 2), (1, 50), (16, 16))
    roomy_key, roomy_value = (
        np.full((3, 2, 4096, 16), NAN, np.float32),
        np.full((3, 2, 4096, 16), NAN, np.float32),
    )
    roomy_key[:, :, :50], roomy_value[:, :, :50] = key, value
    lengths = np.array([50, 1, 17])
    expected = sdpa(query, key, value, kv_lengths=lengths)
    assert_within(sdpa(query, roomy_key, roomy_value, kv_lengths=lengths), expected, 1e-6)
    for item, length in enumerate(lengths):
        cut = [array[item : item + 1, :, :length] for array in (key, value)]
        assert_within(sdpa(query[item : item + 1], *cut), expected[item : item + 1], 1e-6)


def test_poison_does_not_reach_the_summary_or_the_scores() -> None:
    query, key, _ = arrays_of("prefill")
    keep = np.arange(300) % 3 != 1
    dirty = key.copy()
    dirty[..., ~keep, :] = NAN
    for name in ("entropy", "top_weights", "top_keys", "received"):
        clean = getattr(npattn.attention_summary(query, key, keep), name)
        assert_same_bits(getattr(npattn.attention_summary(query, dirty, keep), name), clean)
    assert_same_bits(npattn.attention_weights(query, dirty, keep), npattn.attention_weights(query, key, keep))
    scores = npattn.attention_scores(query, dirty, keep)
    assert_same_bits(scores, npattn.attention_scores(query, key, keep))
    assert (scores[..., ~keep] == -INF).all()
    true_scores = npattn.attention_scores(query, key, keep, stage="scaled")
    assert np.isfinite(true_scores).all()
    within_length = npattn.attention_scores(query, key, stage="scaled", kv_lengths=10)
    assert (within_length[..., 10:] == -INF).all()


def test_rows_without_keys_are_positive_zeros_beside_sinks() -> None:
    """However threads cut the rows: 64 queries, the first 10 of which see nothing, negative values."""
    query, key, _ = random_qkv((2,), (2, 2), (64, 31), (33, 33), np.float32)
    value = -np.ones((2, 2, 31, 33), np.float32)
    options: dict[str, Any] = {"is_causal": True, "query_offset": -10, "sinks": np.zeros(2)}
    for threads in (1, 2, 8):
        with npattn.threads(threads):
            out = sdpa(query, key, value, **options)
        assert_same_bits(out[:, :, :10], np.zeros((2, 2, 10, 33), np.float32))
        assert (out[:, :, 10:] < 0).all()
