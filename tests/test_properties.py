"""Laws of attention that hold for any arrays and options (Hypothesis)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import npattn
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from npattn import reference
from npattn import scaled_dot_product_attention as sdpa
from shapes import Array
from support import DTYPES, assert_same_bits, assert_within, tolerances_of
from tolerances import unit

pytestmark = pytest.mark.usefixtures("isa")


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float32", "float64")) -> dict[str, Any]:
    """A call with any combination of sizes and options: the keyword arguments, arrays among them."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    query_len, key_len = draw(st.integers(0, 40)), draw(st.integers(0, 80))
    head_dim, value_dim = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    leading = draw(st.sampled_from([(), (1,), (2,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = DTYPES[draw(st.sampled_from(dtypes))]
    spread = draw(st.sampled_from([0.1, 1.0, 5.0]))

    def array(*shape: int) -> Array:
        return (spread * rng.standard_normal(shape)).astype(dtype)

    call: dict[str, Any] = {
        "query": array(*leading, heads, query_len, head_dim),
        "key": array(*leading, kv_heads, key_len, head_dim),
        "value": array(*leading, kv_heads, key_len, value_dim),
    }
    optional = {
        "attn_mask": lambda: rng.random((heads, query_len, key_len)) < 0.7,
        "bias": lambda: rng.standard_normal((query_len, key_len)).astype(np.float32),
        "is_causal": lambda: True,
        "window": lambda: (int(rng.integers(0, 20)), int(rng.integers(0, 20))),
        "kv_lengths": lambda: rng.integers(0, key_len + 1, leading),
        "scale": lambda: float(rng.uniform(-1, 1)),
        "softcap": lambda: float(rng.uniform(0.5, 5)),
        "sinks": lambda: rng.standard_normal(heads),
        "alibi_slopes": lambda: rng.random(heads) / 4,
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        call[name] = optional[name]()
    call["query_offset"] = draw(st.integers(-5, 60))
    return call


def arrays_of(call: dict[str, Any]) -> tuple[Array, Array, Array]:
    return call["query"], call["key"], call["value"]


def within(call: dict[str, Any]) -> Any:
    added = 5.0 + 40.0 * ("alibi_slopes" in call)
    return tolerances_of(*arrays_of(call), scale=call.get("scale"), added=added)


@given(calls(dtypes=("float32", "float64", "float16", "bfloat16")))
@settings(max_examples=100)
def test_agrees_with_the_reference(call: dict[str, Any]) -> None:
    actual = sdpa(**call, return_weights=True, return_lse=True)
    expected = reference.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
    limits = within(call)
    for got, wanted, limit in zip(actual, expected, (limits.output, limits.weights, limits.lse), strict=True):
        assert_within(got, wanted, limit)


@given(calls())
def test_rows_of_weights_sum_to_one(call: dict[str, Any]) -> None:
    call.pop("sinks", None)
    _, weights, lse = sdpa(**call, return_weights=True, return_lse=True)
    sums = weights.astype(np.float64).sum(-1)
    empty = lse == -np.inf
    assert not weights[empty].any()
    roundoff = 80 * unit(weights.dtype)  # of as many weights
    assert_within(sums[~empty], np.ones_like(sums[~empty]), roundoff)
    assert (weights >= 0).all()


@given(calls())
def test_output_is_a_mean_of_values(call: dict[str, Any]) -> None:
    """Each output lies between the least and the largest value of its column, or at zero."""
    call.pop("sinks", None)
    assume(call["key"].shape[-2] > 0)
    out = sdpa(**call)
    value = np.repeat(call["value"], call["query"].shape[-3] // call["value"].shape[-3], axis=-3)
    slack = within(call).output
    low, high = value.min(-2, keepdims=True), value.max(-2, keepdims=True)
    assert (out >= np.minimum(low, 0) - slack).all()
    assert (out <= np.maximum(high, 0) + slack).all()


@given(calls(), st.randoms(use_true_random=False))
def test_keys_may_be_permuted_together_with_values(call: dict[str, Any], random: Any) -> None:
    for positional in ("is_causal", "window", "kv_lengths", "alibi_slopes"):
        call.pop(positional, None)
    order = list(range(call["key"].shape[-2]))
    random.shuffle(order)
    moved = {**call, "key": call["key"][..., order, :], "value": call["value"][..., order, :]}
    for name in ("attn_mask", "bias"):
        if name in call:
            moved[name] = call[name][..., order]
    out, weights, lse = sdpa(**call, return_weights=True, return_lse=True)
    again = sdpa(**moved, return_weights=True, return_lse=True)
    limits = within(call)
    assert_within(again[0], out, 2 * limits.output)
    assert_within(again[1], weights[..., order], 2 * limits.weights)
    assert_within(again[2], lse, 2 * limits.lse)


@given(calls(), st.lists(st.floats(0, 1), max_size=3))
def test_parts_merge_to_the_whole(call: dict[str, Any], cuts: list[float]) -> None:
    """Attention over disjoint ranges of keys, merged by log-sum-exp; each part masks its own keys."""
    call.pop("kv_lengths", None)
    key_len = call["key"].shape[-2]
    borders = sorted({0, key_len, *(int(cut * key_len) for cut in cuts)})
    out, lse = sdpa(**call, return_lse=True)
    outputs, lses = [], []
    for part, (start, stop) in enumerate(pairwise(borders)):
        piece = {**call, "key": call["key"][..., start:stop, :], "value": call["value"][..., start:stop, :]}
        for name in ("attn_mask", "bias"):
            if name in call:
                piece[name] = call[name][..., start:stop]
        piece["query_offset"] = call["query_offset"] - start
        if part > 0:
            piece.pop("sinks", None)
        result = sdpa(**piece, return_lse=True)
        outputs.append(result[0])
        lses.append(result[1])
    assume(outputs)
    merged, merged_lse = npattn.merge_attention(outputs, lses)
    limits = within(call)
    assert_within(merged, out, 2 * limits.output)
    assert_within(merged_lse, lse, 2 * limits.lse)


@given(calls(), st.floats(-3, 3))
def test_adding_a_constant_changes_only_the_lse(call: dict[str, Any], constant: float) -> None:
    call.pop("sinks", None)
    shape = (call["query"].shape[-2], call["key"].shape[-2])
    bias = call.pop("bias", np.zeros(shape, np.float32))
    out, lse = sdpa(**call, bias=bias, return_lse=True)
    moved, moved_lse = sdpa(**call, bias=(bias + np.float32(constant)), return_lse=True)
    limits = within(call)
    assert_within(moved, out, 2 * limits.output + 1e-5)
    assert_within(moved_lse, lse + np.float32(constant), 2 * limits.lse + 1e-5)


@given(calls(dtypes=("float32", "float64", "float16", "bfloat16")), st.data())
def test_hidden_keys_change_no_bit(call: dict[str, Any], data: st.DataObject) -> None:
    weights, lse = sdpa(**call, return_weights=True, return_lse=True)[1:]
    visible = reference.attention_scores(
        **{name: value for name, value in call.items() if name not in ("value", "sinks")}
    )
    group = call["query"].shape[-3] // call["key"].shape[-3]
    hidden = (visible == -np.inf).all(-2)  # (..., Hq, Lk)
    hidden = hidden.reshape(*call["key"].shape[:-2], group, call["key"].shape[-2]).all(-2)
    poison = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e4]))
    dirty = {**call, "key": call["key"].copy(), "value": call["value"].copy()}
    dirty["key"][hidden] = poison
    dirty["value"][hidden] = poison
    out = sdpa(**call)
    again = sdpa(**dirty, return_weights=True, return_lse=True)
    for got, wanted in zip(again, (out, weights, lse), strict=True):
        assert_same_bits(got, wanted)


@given(calls())
def test_one_item_alone(call: dict[str, Any]) -> None:
    assume(call["query"].ndim == 4)
    out = sdpa(**call)
    for item in range(out.shape[0]):
        alone = dict(call)
        for name in ("query", "key", "value"):
            alone[name] = call[name][item]
        if "kv_lengths" in call:
            alone["kv_lengths"] = call["kv_lengths"][item]
        assert_same_bits(sdpa(**alone), out[item])


@given(calls(), st.integers(0, 40))
def test_a_query_alone(call: dict[str, Any], row: int) -> None:
    """A query does not depend on the other queries, beyond rounding (the path may differ)."""
    assume(row < call["query"].shape[-2])
    out = sdpa(**call)
    alone = {
        **call,
        "query": call["query"][..., row : row + 1, :],
        "query_offset": call["query_offset"] + row,
    }
    for name in ("attn_mask", "bias"):
        if name in call:
            alone[name] = call[name][..., row : row + 1, :]
    assert_within(sdpa(**alone), out[..., row : row + 1, :], 2 * within(call).output)
