"""The same bits for any number of threads, any rest of the batch, any memory layout, any set of results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from shapes import LAYOUTS, Array, layouts_of, pattern
from support import DTYPES, assert_same_bits, random_qkv

# (heads, lengths): prefill over several key blocks, decode split into key chunks, few rows, tiny
WORK = {
    "prefill": ((4, 2), (67, 600)),
    "decode": ((4, 4), (1, 1500)),
    "grouped_decode": ((8, 1), (1, 700)),
    "few_rows": ((2, 2), (7, 40)),
    "tiny": ((2, 1), (2, 3)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "everything": {
        "window": (40, 3),
        "softcap": 3.0,
        "sinks": True,
        "alibi": True,
        "bias": True,
        "mask": True,
    },
}


def call(
    work: str, options: str, dtype: Any = np.float32, batch: int = 3
) -> tuple[list[Array], dict[str, Any]]:
    """Arrays (batch, H, L, 40) and keywords; sinks, alibi, bias and mask stand for arrays that fit."""
    heads, lengths = WORK[work]
    arrays = list(random_qkv((batch,), heads, lengths, (40, 40), dtype))
    keywords = dict(OPTIONS[options])
    if keywords:
        keywords["query_offset"] = lengths[1] - lengths[0]
    if keywords.pop("sinks", None):
        keywords["sinks"] = np.linspace(-1, 1, heads[0])
    if keywords.pop("alibi", None):
        keywords["alibi_slopes"] = np.linspace(0.01, 0.1, heads[0])
    if keywords.pop("bias", None):
        keywords["bias"] = pattern((batch, heads[0], *lengths), 29, 7, np.float32)
    if keywords.pop("mask", None):
        keywords["attn_mask"] = pattern((batch, 1, *lengths), 31, 5) > -0.8
    return arrays, keywords


def item(keywords: dict[str, Any], chosen: slice) -> dict[str, Any]:
    """The keywords for a part of the batch."""
    batched = ("bias", "attn_mask")
    return {name: value[chosen] if name in batched else value for name, value in keywords.items()}


# Panels of 20 MiB, which tasks share, and of 69 MiB, which each packs for itself: both meet more rows a task.
@pytest.mark.parametrize(("key_len", "dim"), [(20000, 128), (1100, 8192)])
def test_threads_and_rows_of_panels_that_no_cache_holds(isa: str, key_len: int, dim: int) -> None:
    query, key, value = random_qkv((), (1, 1), (200, key_len), (dim, dim))
    with npattn.threads(1):
        expected = sdpa(query, key, value, query_offset=key_len - 200, is_causal=True)
    for count in (2, 3):
        with npattn.threads(count):
            actual = sdpa(query, key, value, query_offset=key_len - 200, is_causal=True)
            assert_same_bits(actual, expected)
    first = sdpa(query[:, :50], key, value, query_offset=key_len - 200, is_causal=True)
    assert_same_bits(first, expected[:, :50].copy())
    if key_len < 2000:
        assert np.allclose(
            expected,
            npattn.reference.scaled_dot_product_attention(
                query, key, value, query_offset=key_len - 200, is_causal=True
            ),
            atol=1e-5,
        )


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("options", OPTIONS)
def test_threads(isa: str, work: str, options: str) -> None:
    for dtype in (np.float32, np.float64, np.float16):
        arrays, keywords = call(work, options, dtype)
        with npattn.threads(1):
            expected = sdpa(*arrays, **keywords, return_weights=True, return_lse=True)
        for count in (2, 3, 8):
            with npattn.threads(count):
                actual = sdpa(*arrays, **keywords, return_weights=True, return_lse=True)
            for got, wanted in zip(actual, expected, strict=True):
                assert_same_bits(got, wanted)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("options", OPTIONS)
def test_rest_of_the_batch(isa: str, work: str, options: str) -> None:
    arrays, keywords = call(work, options)
    expected, lse = sdpa(*arrays, **keywords, return_lse=True)
    for place in range(3):
        alone = slice(place, place + 1)
        out, alone_lse = sdpa(*[array[alone] for array in arrays], **item(keywords, alone), return_lse=True)
        assert_same_bits(out, expected[alone])
        assert_same_bits(alone_lse, lse[alone])
    backwards = slice(None, None, -1)
    assert_same_bits(sdpa(*[a[backwards] for a in arrays], **item(keywords, backwards))[backwards], expected)
    arrays = [array.copy() for array in arrays]
    for array in arrays:
        array[1] = np.nan
    assert_same_bits(sdpa(*arrays, **keywords)[::2], expected[::2])


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_returned(isa: str, work: str, options: str) -> None:
    for dtype in DTYPES.values():
        arrays, keywords = call(work, options, dtype, batch=1)
        out = sdpa(*arrays, **keywords)
        with_weights, weights = sdpa(*arrays, **keywords, return_weights=True)
        with_lse, lse = sdpa(*arrays, **keywords, return_lse=True)
        everything = sdpa(*arrays, **keywords, return_weights=True, return_lse=True, out=np.empty_like(out))
        for got in (with_weights, with_lse, everything[0]):
            assert_same_bits(got, out)
        assert_same_bits(everything[1], weights)
        assert_same_bits(everything[2], lse)
        assert_same_bits(npattn.attention_weights(*arrays[:2], **keywords), weights)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_layouts_of_the_arrays(isa: str, work: str, dtype: str) -> None:
    arrays, keywords = call(work, "causal", DTYPES[dtype], batch=2)
    expected = sdpa(*arrays, **keywords)
    for place in range(3):
        for name, moved in layouts_of(arrays[place]):
            mixed = [moved if i == place else array for i, array in enumerate(arrays)]
            try:
                assert_same_bits(sdpa(*mixed, **keywords), expected)
            except AssertionError as error:
                raise AssertionError(f"array {place} is {name}") from error
    for name, function in LAYOUTS.items():
        if name != "byte_swapped":
            assert_same_bits(sdpa(*map(function, arrays), **keywords), expected)


@pytest.mark.parametrize("work", WORK)
def test_memory_layouts_of_masks(isa: str, work: str) -> None:
    arrays, keywords = call(work, "everything")
    expected = sdpa(*arrays, **keywords)
    for argument in ("attn_mask", "bias"):
        for name, moved in layouts_of(keywords[argument]):
            try:
                assert_same_bits(sdpa(*arrays, **{**keywords, argument: moved}), expected)
            except AssertionError as error:
                raise AssertionError(f"{argument} is {name}") from error
    for shape in ((1, 1), (1,), (3, 1, 1, 1)):
        rows = pattern((*shape[:-1], WORK[work][1][1]), 29, 7, np.float32)
        whole = np.ascontiguousarray(np.broadcast_to(rows, keywords["bias"].shape))
        assert_same_bits(sdpa(*arrays, bias=rows), sdpa(*arrays, bias=whole))
        assert_same_bits(sdpa(*arrays, rows > -0.5), sdpa(*arrays, whole > -0.5))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_memory_layouts_of_out(isa: str, work: str, dtype: str) -> None:
    arrays, keywords = call(work, "causal", DTYPES[dtype], batch=2)
    expected = sdpa(*arrays, **keywords)
    for name, out in layouts_of(np.zeros_like(expected)):
        if name in ("read_only", "byte_swapped"):
            continue
        assert sdpa(*arrays, **keywords, out=out) is out
        try:
            assert_same_bits(out, expected)
        except AssertionError as error:
            raise AssertionError(f"out is {name}") from error


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("options", OPTIONS)
def test_axis_order(isa: str, work: str, options: str) -> None:
    """layout="BSHD" is a matter of strides: the same bits, and heads last in `out`."""
    arrays, keywords = call(work, options)
    expected = sdpa(*arrays, **keywords)
    swapped = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
    out = np.empty_like(swapped[0])
    assert sdpa(*swapped, **keywords, layout="BSHD", out=out) is out
    assert_same_bits(out.swapaxes(1, 2), expected)


@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_out_overlaps_an_input(isa: str, length: int, place: int) -> None:
    """The result is as if it did not: out is the input itself, or lies across its next head or row."""
    for dtype in (np.float32, np.float16):
        arrays = random_qkv((1,), (3, 3), (length, length), (40, 40), dtype)
        expected = sdpa(*arrays)
        for heads, rows in ((0, 0), (0, 1), (1, 0), (2, 1)):
            for count in (1, 2):
                buffer = np.zeros((1, 3 + heads, length + rows, 40), dtype)
                moved = list(arrays)
                moved[place] = buffer[:, :3, :length]
                moved[place][...] = arrays[place]
                out = buffer[:, heads:, rows:]
                with npattn.threads(count):
                    assert sdpa(*moved, out=out) is out
                assert_same_bits(np.ascontiguousarray(out), expected)


def test_out_overlaps_what_is_added(isa: str) -> None:
    arrays = random_qkv((1,), (3, 3), (300, 40), (16, 40))
    for name in ("attn_mask", "bias"):
        addend = pattern((1, 3, 300, 40), 29, 7, np.float32)
        expected = sdpa(*arrays, **{name: addend})
        buffer = np.zeros((1, 4, 300, 40), np.float32)
        buffer[:, :3] = addend
        sdpa(*arrays, **{name: buffer[:, :3]}, out=buffer[:, 1:])
        assert_same_bits(np.ascontiguousarray(buffer[:, 1:]), expected)


def test_repeated_calls(isa: str) -> None:
    arrays, keywords = call("prefill", "everything")
    expected = sdpa(*arrays, **keywords)
    for _ in range(20):
        assert_same_bits(sdpa(*arrays, **keywords), expected)


def test_callers_at_once(isa: str) -> None:
    """Several Python threads call at the same time; each gets the bits it gets alone."""
    calls = [call(work, options) for work in WORK for options in OPTIONS]
    alone = [sdpa(*arrays, **keywords) for arrays, keywords in calls]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = pool.map(lambda one: sdpa(*one[0], **one[1]), calls)
            for got, wanted in zip(together, alone, strict=True):
                assert_same_bits(got, wanted)


@pytest.mark.parametrize("key_len", [66_000, 33_000, 8_000])
def test_heads_take_turns_in_the_memory_for_panels(key_len: int) -> None:
    """Panels of one, of two and of many heads fit at a time."""
    query, key, value = random_qkv((), (5, 5), (40, key_len), (64, 64))
    alone = np.concatenate([sdpa(query[h : h + 1], key[h : h + 1], value[h : h + 1]) for h in range(5)])
    for count in (1, 2, 5):
        with npattn.threads(count):
            assert_same_bits(sdpa(query, key, value), alone)
