"""Attention over float16 and bfloat16: that of float32 on the same numbers, rounded once.

Where an instruction multiplies bfloat16 as it is, the weights are bfloat16 too: then errors are bounded.
"""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pytest
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from options import OPTIONS, PATHS, call_tolerances, call_with
from shapes import FEW_LENGTHS, Array, every_second, layouts_of
from support import assert_same_bits, assert_within, multiplies_halves, random_qkv, tolerances_of
from tolerances import BFLOAT16, tolerance, unit

pytestmark = pytest.mark.usefixtures("isa")

HALVES = (np.dtype(np.float16), BFLOAT16)
ARRAYS = ("query", "key", "value")


def rounded(result: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        return result.astype(dtype)


def wide(x: Array) -> Array:
    return x.astype(np.float32)


def dots(*arrays: Array) -> bool:
    """True where the active instruction set multiplies these queries, keys and values as they are."""
    return multiplies_halves() and all(array.dtype == BFLOAT16 for array in arrays)


def packed(query: Array, key: Array) -> bool:
    """True for calls with enough rows that keys are packed: (..., Hq, Lq, E), (..., Hkv, Lk, E)."""
    rows = query.shape[-2] * (query.shape[-3] // key.shape[-3])
    return rows >= 16 and not (query.shape[-2] == 1 and rows <= 64)


def assert_rounded(actual: tuple[Array, ...], single: tuple[Array, ...], dtype: np.dtype[Any]) -> None:
    """Output and weights are those of float32, rounded; lse is that of float32."""
    for got, wanted in zip(actual[:2], single[:2], strict=True):
        assert_same_bits(got, rounded(wanted, dtype))
    assert_same_bits(actual[2], single[2])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", FEW_LENGTHS, ids=lambda lengths: "x".join(map(str, lengths)))
def test_half_is_float32_rounded(lengths: tuple[int, int], dtype: np.dtype[Any]) -> None:
    for head_dim, value_dim in ((64, 64), (1, 33), (17, 5), (600, 40)):
        arrays = random_qkv((2,), (4, 2), lengths, (head_dim, value_dim), dtype)
        both = {"return_weights": True, "return_lse": True}
        single = sdpa(*map(wide, arrays), **both)
        actual = sdpa(*arrays, **both)
        if dots(*arrays) and packed(*arrays[:2]):
            allowed = tolerances_of(*arrays)
            exact = reference.scaled_dot_product_attention(*arrays, **both)
            assert_within(actual[0], exact[0], allowed.output)
            assert_within(actual[1], exact[1], allowed.weights)
            assert_within(actual[2], exact[2], allowed.lse)
        else:
            assert_rounded(actual, single, dtype)
        scores = npattn.attention_scores(*arrays[:2])
        if dots(*arrays) and packed(*arrays[:2]):
            exact_scores = reference.attention_scores(*arrays[:2])
            assert_within(scores, exact_scores, allowed.scores, unit(dtype))
        else:
            assert_same_bits(scores, rounded(npattn.attention_scores(*map(wide, arrays[:2])), dtype))
        # mixed: a float32 query is never rounded
        query, key, value = arrays
        assert_rounded(sdpa(wide(query), key, value, **both), single, np.dtype(np.float32))
        assert_rounded(sdpa(query, wide(key), wide(value), **both), single, np.dtype(np.float32))
        assert_rounded(sdpa(query, key, wide(value), **both), single, np.dtype(np.float32))
        finer = wide(query) * np.float32(1 + 2.0**-20)
        assert_same_bits(sdpa(finer, key, value), sdpa(finer, wide(key), wide(value)))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_options_on_half_keys(path: str, dtype: np.dtype[Any]) -> None:
    """Each option alone: a float32 query on half keys, and all three half."""
    for name, (argument, _) in OPTIONS.items():
        if argument == "dtype":
            continue
        call = call_with(path, (name,))
        for array in ARRAYS[1:]:
            call[array] = call[array].astype(dtype)
        single = dict(call, **{array: wide(call[array]) for array in ARRAYS})
        assert_same_bits(sdpa(**call), sdpa(**single))
        call["query"] = call["query"].astype(dtype)
        single["query"] = wide(call["query"])
        out = sdpa(**call)
        if dots(*(call[array] for array in ARRAYS)):
            exact = reference.scaled_dot_product_attention(**call)
            assert_within(out, exact, call_tolerances(call).output)
        else:
            assert_same_bits(out, rounded(sdpa(**single), dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (7, 40), (40, 301)])
def test_half_outputs_of_any_layout(lengths: tuple[int, int], dtype: np.dtype[Any]) -> None:
    arrays = random_qkv((2,), (4, 2), lengths, (24, 17), dtype)
    expected, weights = sdpa(*arrays, return_weights=True)
    assert_same_bits(npattn.attention_weights(*arrays[:2]), weights)
    for name, out in layouts_of(np.zeros_like(expected)):
        if name not in ("byte_swapped", "read_only"):
            assert sdpa(*arrays, out=out) is out
            assert_same_bits(out, expected)
    for moved in map(every_second, arrays):
        mixed = [moved if moved.shape == array.shape else array for array in arrays]
        assert_same_bits(sdpa(*mixed), sdpa(*map(np.ascontiguousarray, mixed)))
    if lengths[0] == 40:
        out = np.zeros((40, 3, 17), dtype)
        tokens = [np.ascontiguousarray(array[0].swapaxes(0, 1)) for array in arrays]
        expected = sdpa(*(array[0] for array in arrays))
        packed_out = npattn.varlen_attention(*tokens, [0, 40], [0, 301])
        assert_same_bits(np.ascontiguousarray(packed_out.swapaxes(0, 1)), expected)
        wide_out = np.zeros((40, 4, 2, 17), dtype)[:, :, 1]
        assert npattn.varlen_attention(*tokens, [0, 40], [0, 301], out=wide_out) is wide_out
        assert_same_bits(np.ascontiguousarray(wide_out), packed_out)
        mixed_out = npattn.varlen_attention(wide(tokens[0]), *tokens[1:], [0, 40], [0, 301])
        assert mixed_out.dtype == np.float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (5, 40), (70, 301)])
def test_hidden_poison_leaves_no_trace(lengths: tuple[int, int], dtype: np.dtype[Any]) -> None:
    arrays = random_qkv((2,), (4, 2), lengths, (24, 17), dtype)
    mask = np.random.default_rng(0).random((2, 4, *lengths)) < 0.6
    mask[..., 1::7] = False
    offset = lengths[1] - lengths[0]
    for options in ({}, {"is_causal": True, "query_offset": offset}):
        expected, weights, lse = sdpa(*arrays, mask, **options, return_weights=True, return_lse=True)
        for bad in (np.nan, np.inf, -np.inf):
            poisoned = [array.copy() for array in arrays]
            for array in poisoned[1:]:
                array[..., 1::7, :] = bad
            actual = sdpa(*poisoned, mask, **options, return_weights=True, return_lse=True)
            for got, wanted in zip(actual, (expected, weights, lse), strict=True):
                assert_same_bits(got, wanted)
    query, key, value = (array.copy() for array in arrays)
    value[0, 0, -1, 3] = np.nan  # seen by the last position alone
    out = sdpa(query, key, value, is_causal=True, query_offset=offset)
    clean = sdpa(*arrays, is_causal=True, query_offset=offset)
    assert np.isnan(wide(out[0, :2, -1, 3])).all()
    assert_same_bits(out[:, :, :-1], clean[:, :, :-1])
    assert_same_bits(out[0, 2:], clean[0, 2:])


@pytest.mark.parametrize("tiny", [1e-39, 3e-38])
def test_hidden_poison_beside_tiny_values(tiny: float) -> None:
    """Whether sums that small are 0 does not depend on what nobody sees."""
    query, key, _ = random_qkv((), (2, 2), (70, 70), (32, 32), BFLOAT16)
    value = np.full((2, 70, 32), tiny).astype(BFLOAT16)
    mask = np.ones((70, 70), bool)
    mask[:, 5] = False
    expected = sdpa(query, key, value, mask)
    value[:, 5] = np.nan
    assert_same_bits(sdpa(query, key, value, mask), expected)


@pytest.mark.parametrize("rows", [1, 30])
def test_large_and_tiny_numbers(rows: int) -> None:
    f16 = np.float16
    for dtype in HALVES:
        query, key = np.full((1, rows, 64), 200, dtype), np.full((1, 300, 64), 200, dtype)
        key[0, 7] = 201  # scores of 2.5 million: beyond float16
        value = np.arange(300).astype(dtype)[None, :, None]
        for scale in (1.0, -1.0):
            out, lse = sdpa(dtype.type(scale) * query, key, value, scale=scale, return_lse=True)
            assert (out == 7).all()
            assert lse.dtype == np.float32
            assert (lse == 200 * 201 * 64).all()
        lowest = np.full((rows, 300), np.finfo(np.float32).min)  # finite: every key is seen alike
        assert (sdpa(0 * query, key, 0 * value + 3, lowest) == 3).all()
        scores = npattn.attention_scores(query, key, scale=1.0)
        assert (scores == (np.inf if dtype == f16 else rounded(np.float32(200 * 200 * 64), dtype)))[
            0, :, 0
        ].all()
        equal = np.zeros((1, rows, 8), dtype), np.ones((1, 70_000, 8), dtype)
        out = sdpa(*equal, np.ones((1, 70_000, 3), dtype))
        assert (out == 1).all()
        top = np.full((1, 70_000, 3), np.asarray(6e4, dtype))  # their sum is beyond float16
        assert (sdpa(*equal, top) == top[0, 0, 0]).all()
        small = np.full((1, 70_000, 3), 2.0**-14, dtype)
        assert (sdpa(*equal, small) == small[0, 0, 0]).all()
    weights = npattn.attention_weights(np.zeros((1, rows, 8), f16), np.ones((1, 70_000, 8), f16))
    assert (weights == f16(1 / 70_000)).all()
    denormal = np.full((1, 300, 3), 2.0**-24, f16)
    assert (sdpa(query.astype(f16), key.astype(f16), denormal) == denormal[0, 0, 0]).all()


@pytest.mark.parametrize("rows", [1, 30])
def test_denormal_bfloat16_is_zero_for_the_instruction_alone(rows: int) -> None:
    query, key = np.full((1, rows, 2), 2.0**100, BFLOAT16), np.full((1, 3, 2), 2.0**-130, BFLOAT16)
    value = np.full((1, 3, 4), 2.0**-130, BFLOAT16)
    flushed = dots(query, key, value) and rows > 1
    score, out = (0.0, 0.0) if flushed else (2.0**-29, 2.0**-130)
    assert (npattn.attention_scores(query, key, scale=1.0) == score).all()
    assert (sdpa(query, key, value) == out).all()
    assert (sdpa(wide(query), key, value) == 2.0**-130).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_error_is_that_of_rounding_the_result(offset: float, dtype: np.dtype[Any]) -> None:
    for lengths, causal in (((80, 521), False), ((30, 30), True), ((1, 400), False)):
        least, ours = np.zeros(2), np.zeros(2)
        for seed in range(4):
            drawn = random_qkv((), (8, 4), lengths, (64, 64), np.float64, seed)
            arrays = [(array + offset).astype(dtype) for array in drawn]
            exact = reference.scaled_dot_product_attention(*arrays, is_causal=causal)
            for errors, result in ((least, exact.astype(dtype)), (ours, sdpa(*arrays, is_causal=causal))):
                difference = np.abs(result.astype(np.float64) - exact)
                errors += np.sqrt(np.mean(difference**2)), difference.max()
        assert (ours <= 1.5 * least).all(), ours / least


def test_log_sum_exp_is_that_of_float32() -> None:
    """Rounded weights do not show in it, nor in the sum of the weights that are returned."""
    arrays = random_qkv((), (2, 2), (50, 333), (64, 8), BFLOAT16)
    _, weights, lse = sdpa(*arrays, return_weights=True, return_lse=True)
    single_weights, single_lse = sdpa(*map(wide, arrays), return_weights=True, return_lse=True)[1:]
    assert_within(lse, single_lse, 2e-6)
    assert_within(weights, single_weights, 0, 1.001 * unit(BFLOAT16))
    sink = np.array([2.0, -np.inf])
    assert_within(
        sdpa(*arrays, sinks=sink, return_lse=True)[1],
        sdpa(*map(wide, arrays), sinks=sink, return_lse=True)[1],
        2e-6,
    )


def test_long_half_keys() -> None:
    """Panels of a head pass their limit: they are packed block by block."""
    query, key, value = random_qkv((), (1, 1), (110, 140_001), (128, 128), BFLOAT16)
    whole = sdpa(query, key, value)
    assert_same_bits(sdpa(query[:, 90:], key, value), whole[:, 90:])  # one block of rows
    exact = reference.scaled_dot_product_attention(query[:, :2], key, value)
    assert_within(whole[:, :2], exact, 4e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(1, 2000), (40, 600), (200, 700)])
def test_threads_and_batches_share_the_bits(lengths: tuple[int, int], dtype: np.dtype[Any]) -> None:
    arrays = random_qkv((3,), (4, 2), lengths, (40, 40), dtype)
    for query in (arrays[0], wide(arrays[0])):
        call = (query, *arrays[1:])
        with npattn.threads(1):
            expected = sdpa(*call, is_causal=True, query_offset=lengths[1] - lengths[0])
        for count in (2, 3):
            with npattn.threads(count):
                assert_same_bits(sdpa(*call, is_causal=True, query_offset=lengths[1] - lengths[0]), expected)
        alone = sdpa(*(array[1:2] for array in call), is_causal=True, query_offset=lengths[1] - lengths[0])
        assert_same_bits(alone, expected[1:2])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_copy_of_half_keys(dtype: np.dtype[Any]) -> None:
    """The summary and the plain way read half arrays too."""
    arrays = random_qkv((2,), (4, 2), (30, 50), (24, 24), dtype)
    summary = npattn.attention_summary(*arrays[:2])
    assert summary.entropy.dtype == np.float32
    exact = reference.attention_weights(*arrays[:2]).sum(-2)
    assert_within(summary.received, exact, 30 * tolerance(dtype))
    plain = sdpa(*arrays)
    assert plain.dtype == dtype
    assert_same_bits(plain, sdpa(*arrays, return_lse=True)[0])
    swapped = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
    assert_same_bits(sdpa(*swapped, layout="BSHD").swapaxes(1, 2), plain)


def test_other_ways_see_denormal_bfloat16() -> None:
    """A float32 query does, of a cache too."""
    zeros, values = np.zeros((1, 30, 32), BFLOAT16), np.full((1, 30, 32), 2.0**-130, BFLOAT16)
    assert (sdpa(zeros, zeros, values) == (0.0 if dots(values) else 2.0**-130)).all()
    assert (sdpa(wide(zeros), zeros, values) == np.float32(2.0**-130)).all()
    cache = npattn.KVCache(1, 1, 32, dtype=BFLOAT16)
    cache.append(zeros[None], values[None])
    expected = 0.0 if dots(values) else 2.0**-130
    assert (cache.attend(zeros[None], is_causal=False) == expected).all()
    assert (cache.attend(wide(zeros)[None], is_causal=False) == np.float32(2.0**-130)).all()
