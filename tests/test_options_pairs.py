"""Every pair of options of attention against the reference, on every path and ISA; none is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import npattn
import numpy as np
import pytest
from npattn import reference
from options import OPTIONS, PATHS, Call, call_tolerances, call_with
from support import Tolerances, assert_within, each_isa, random_qkv
from tolerances import tolerance

STAGES = ("scaled", "capped", "masked")
PAIRS = [(a, b) for a, b in combinations(OPTIONS, 2) if OPTIONS[a][0] != OPTIONS[b][0]]


def check(path: str, names: tuple[str, ...]) -> None:
    """Output, weights and lse; every subset of them asked for; out=; all with the same bits."""
    call = call_with(path, names)
    expected = reference.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
    within = call_tolerances(call)
    for isa in each_isa():
        try:
            check_results(call, expected, within)
        except Exception as error:
            raise AssertionError(f"{path} on {isa}: {' with '.join(names)}") from error


def check_results(
    call: Call, expected: tuple[np.ndarray, np.ndarray, np.ndarray], within: Tolerances
) -> None:
    out = npattn.scaled_dot_product_attention(**call)
    assert out.dtype == np.result_type(*(call[name] for name in ("query", "key", "value")))
    assert_within(out, expected[0], within.output)
    given = np.empty_like(out)
    all_three = npattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True, out=given)
    again, weights, lse = all_three
    assert again is given
    assert np.array_equal(again, out)
    assert_within(weights, expected[1], within.weights)
    assert not weights.astype(np.float64)[expected[1] == 0].any()
    assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
    assert_within(lse, expected[2], within.lse)
    _, only_lse = npattn.scaled_dot_product_attention(**call, return_lse=True)
    assert np.array_equal(only_lse, lse)
    _, only_weights = npattn.scaled_dot_product_attention(**call, return_weights=True)
    assert np.array_equal(only_weights, weights)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_single_options(path: str, name: str) -> None:
    check(path, (name,))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("first", OPTIONS)
def test_pairs(path: str, first: str) -> None:
    for pair in PAIRS:
        if pair[0] == first:
            check(path, pair)


EVERYTHING = [
    (
        "grouped",
        "bool_mask",
        "bias",
        "causal",
        "window",
        "offset_per_batch",
        "kv_lengths",
        "scale",
        "softcap",
    ),
    ("float64", "float_mask", "bias", "window", "offset_per_batch", "kv_lengths", "sinks", "alibi_per_batch"),
    ("grouped", "bfloat16", "strided", "key_mask", "causal", "softcap", "sinks", "alibi", "heads_last"),
    ("one_key_batch", "half_keys", "bool_mask", "bias", "window", "kv_lengths", "alibi", "heads_last"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", EVERYTHING, ids=range(len(EVERYTHING)))
def test_many_options_at_once(path: str, names: tuple[str, ...]) -> None:
    check(path, names)


def pairs_without_values(path: str, first: str) -> Iterator[tuple[str, Call]]:
    """(what it is, the call) for an option alone and in every pair it leads."""
    for pair in [(first,), *(pair for pair in PAIRS if pair[0] == first)]:
        call = call_with(path, pair)
        del call["value"]
        yield f"{path}: {' with '.join(pair)}", call


@pytest.mark.parametrize("path", ["prefill", "decode", "tiny"])
@pytest.mark.parametrize("first", OPTIONS)
def test_pairs_of_weights_and_scores(path: str, first: str) -> None:
    """attention_weights and attention_scores take the same options and mean the same."""
    for name, call in pairs_without_values(path, first):
        weights = reference.attention_weights(**call)
        scores = {stage: reference.attention_scores(**call, stage=stage) for stage in STAGES}
        for isa in each_isa():
            try:
                check_weights_and_scores(call, weights, scores)
            except AssertionError as error:
                raise AssertionError(f"{name} on {isa}") from error


@pytest.mark.parametrize("path", ["prefill", "decode", "tiny"])
@pytest.mark.parametrize("first", OPTIONS)
def test_pairs_of_summaries(path: str, first: str) -> None:
    """So does attention_summary."""
    for name, call in pairs_without_values(path, first):
        summary, weights = reference.attention_summary(**call, top_k=3), reference.attention_weights(**call)
        for isa in each_isa():
            try:
                check_summary(call, summary, weights)
            except AssertionError as error:
                raise AssertionError(f"{name} on {isa}") from error


def check_weights_and_scores(call: Call, weights: np.ndarray, scores: dict[str, np.ndarray]) -> None:
    within = call_tolerances(call)
    dtype = np.result_type(call["query"], call["key"])
    assert_within(npattn.attention_weights(**call), weights, within.weights)
    for stage, expected in scores.items():
        rounded = 2 * tolerance(dtype)  # to the dtype of the result
        assert_within(npattn.attention_scores(**call, stage=stage), expected, within.scores, rounded)


def check_summary(call: Call, expected: reference.AttentionSummary, weights: np.ndarray) -> None:
    """Each part within what its weights may be off by; top_keys through the weight of the key it names."""
    off = call_tolerances(call).weights
    query_len, key_len = weights.shape[-2:]
    summary = npattn.attention_summary(**call, top_k=3)
    assert_within(summary.entropy, expected.entropy, 2 * off * (1 + np.log(key_len)))
    assert_within(summary.received, expected.received, 2 * off * query_len)
    assert_within(summary.top_weights, expected.top_weights, 2 * off)
    named = np.take_along_axis(weights, np.maximum(summary.top_keys, 0), axis=-1)
    named = np.where(summary.top_keys < 0, 0.0, named)
    assert_within(named, expected.top_weights, 4 * off)
    assert ((summary.top_keys == -1) == (summary.top_weights == 0)).all()


VARLEN = [
    "causal",
    "window",
    "window_left",
    "scale",
    "softcap",
    "sinks",
    "alibi",
    "offset_per_batch",
    "grouped",
]
VARLEN += ["strided", "float64", "float16", "bfloat16"]


def varlen_call(names: tuple[str, ...]) -> Call:
    """Packed sequences: prefill, decode, one without keys, one without queries, a few rows."""
    cu_q, cu_k = np.array([0, 40, 41, 44, 44, 49]), np.array([0, 280, 340, 340, 350, 390])
    query, key, value = random_qkv((), (4, 4), (49, 390), (24, 24))
    call: Call = {"query": query[None], "key": key[None], "value": value[None]}
    for name in names:
        OPTIONS[name][1](call)
    for name in ("query", "key", "value"):
        call[name] = call[name][0].swapaxes(0, 1)
    if {"is_causal", "window", "alibi_slopes", "query_offset"} & set(call):
        call["query_offset"] = np.diff(cu_k) - np.diff(cu_q) - ("offset_per_batch" in names)
    return {**call, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


@pytest.mark.parametrize("first", VARLEN)
def test_pairs_of_varlen(first: str) -> None:
    second = [name for name in VARLEN if OPTIONS[name][0] != OPTIONS[first][0]]
    for names in [(first,), *((first, name) for name in second)]:
        call = varlen_call(names)
        expected, expected_lse = reference.varlen_attention(**call, return_lse=True)
        within = call_tolerances({**call, "layout": "BSHD"})
        for isa in each_isa():
            out, lse = npattn.varlen_attention(**call, return_lse=True)
            given = npattn.varlen_attention(**call, out=np.empty_like(out))
            assert out.dtype == np.result_type(*(call[name] for name in ("query", "key", "value")))
            try:
                assert_within(out, expected, within.output)
                assert_within(lse, expected_lse, within.lse)
                assert np.array_equal(given, out)
            except AssertionError as error:
                raise AssertionError(f"varlen on {isa}: {' with '.join(names)}") from error
