"""ONNX Attention, opset 25: the reference evaluator of the onnx package as an oracle over random attributes.

The evaluator (onnx 1.23) deviates from the text of the operator in two places; ``ask`` goes around them, and
a test of each fails when it is gone:

- Mode 0 of qk_matmul_output, "raw QK matmul result", comes out soft-capped where there is a softcap.
- The causal frontier, "computed independently of attn_mask", is computed for as many queries as the mask has
  rows: where a mask broadcasts over the queries, all of them see what the first one sees.

Where the text leaves the meaning open we follow it: an attn_mask whose last axis is 1 is a mask for the first
key, the rest hidden, not one that broadcasts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, assert_within, each_isa, tolerances_of
from tolerances import largest

pytest.importorskip("onnx", minversion="1.23", reason="needs onnx 1.23 or later (extra test)")

from onnx_evaluator import evaluate as evaluate_node

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")

Case = tuple[dict[str, np.ndarray], dict[str, Any]]  # inputs, attributes


def evaluate(inputs: dict[str, np.ndarray], attributes: dict[str, Any]) -> dict[str, np.ndarray]:
    return evaluate_node("Attention", 25, (INPUTS, OUTPUTS), inputs, attributes)


def ask(inputs: dict[str, np.ndarray], attributes: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the operator's text says: the evaluator's outputs, its two deviations avoided."""
    if attributes.get("is_causal") and "attn_mask" in inputs:
        query, mask = inputs["Q"], inputs["attn_mask"]
        shape = np.broadcast_shapes(mask.shape, (query.shape[-2], 1))
        inputs = inputs | {"attn_mask": np.ascontiguousarray(np.broadcast_to(mask, shape))}
    outputs = evaluate(inputs, attributes)
    if attributes["qk_matmul_output_mode"] == 0:
        raw = evaluate(inputs, attributes | {"softcap": 0.0})
        outputs["qk_matmul_output"] = raw["qk_matmul_output"]
    return outputs


@st.composite
def masks(
    draw: st.DrawFn, rows: tuple[int, int, int], key_len: int, shortest: int, rng: np.random.Generator
) -> np.ndarray:
    """Bool or float, of any rank that broadcasts to (batch, heads, Lq) = ``rows`` and the keys; the last axis
    may be shorter than the keys, ``shortest`` or longer.
    """
    last = draw(st.sampled_from([key_len, max(shortest, key_len - 3), max(shortest, 1)]))
    before = [size if draw(st.booleans()) else 1 for size in rows][draw(st.integers(0, 3)) :]
    normal = rng.standard_normal((*before, last))
    kind = draw(st.sampled_from(["bool", "float", "float with -inf"]))
    if kind == "bool":
        return normal > -0.5
    return np.where(normal < -0.8, -np.inf, normal) if kind == "float with -inf" else normal


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    query_len, new_len = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 7, 33, 70]))
    head_dim, value_dim = draw(st.sampled_from([1, 4, 17])), draw(st.sampled_from([1, 4, 9]))
    cache = draw(st.sampled_from(["none", "past", "nonpad"]))
    key_len = new_len
    inputs = {
        "Q": rng.standard_normal((batch, heads, query_len, head_dim)),
        "K": rng.standard_normal((batch, kv_heads, new_len, head_dim)),
        "V": rng.standard_normal((batch, kv_heads, new_len, value_dim)),
    }
    shortest = 0
    if cache == "past":
        past_len = draw(st.integers(0, 20))
        key_len += past_len
        inputs["past_key"] = rng.standard_normal((batch, kv_heads, past_len, head_dim))
        inputs["past_value"] = rng.standard_normal((batch, kv_heads, past_len, value_dim))
    elif cache == "nonpad":
        inputs["nonpad_kv_seqlen"] = rng.integers(0, key_len + 1, batch)
        shortest = int(inputs["nonpad_kv_seqlen"].max())
    if draw(st.booleans()):
        inputs["attn_mask"] = draw(masks((batch, heads, query_len), key_len, shortest, rng))
    attributes: dict[str, Any] = {"is_causal": draw(st.integers(0, 1))}
    if draw(st.booleans()):  # packed: (batch, length, heads * width)
        for name in ("Q", "K", "V"):
            rows = inputs[name].swapaxes(1, 2)
            inputs[name] = rows.reshape(*rows.shape[:2], -1)
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    attributes |= draw(
        st.fixed_dictionaries(
            {"qk_matmul_output_mode": st.integers(0, 3)},
            optional={
                "left_window_size": st.integers(-1, 6),
                "right_window_size": st.integers(-1, 6),
                "scale": st.sampled_from([0.0, 0.25, 2.25]),  # the evaluator takes their roots in float32
                "softcap": st.sampled_from([0.0, 0.5, 4.0]),
            },
        )
    )
    return inputs, attributes


def agree(case: Case, recipe: Any) -> None:
    """The recipe in float64, float32 and float16 against the evaluator in float64."""
    inputs, attributes = case
    for name, dtype in DTYPES.items():
        if name == "bfloat16":
            continue  # not a type of the evaluator's NumPy; its rounding is float16's test's
        rounded = {
            key: x.astype(dtype) if x.dtype == np.float64 and key != "attn_mask" else x
            for key, x in inputs.items()
        }
        exact = {key: x.astype(np.float64) if x.dtype == dtype else x for key, x in rounded.items()}
        expected = ask(exact, attributes)
        for _ in each_isa():
            actual = dict(zip(OUTPUTS, recipe(**rounded, **attributes), strict=True))
            check(actual, expected, exact, attributes, dtype)


def check(
    actual: dict[str, Any], expected: dict[str, Any], inputs: dict[str, Any], attributes: Any, dtype: Any
) -> None:
    heads = actual["qk_matmul_output"].shape[1]
    query = inputs["Q"]
    if query.ndim == 3:
        query = query.reshape(*query.shape[:2], heads, -1).swapaxes(1, 2)
    key, value = expected["present_key"], expected["present_value"]
    within = tolerances_of(
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        scale=attributes.get("scale"),
        added=largest(inputs["attn_mask"]) if "attn_mask" in inputs else 0.0,
    )
    assert actual["Y"].dtype == dtype
    assert_within(actual["Y"], expected["Y"], within.output)
    np.testing.assert_array_equal(actual["present_key"], key)
    np.testing.assert_array_equal(actual["present_value"], value)
    mode = attributes["qk_matmul_output_mode"]
    a, e = actual["qk_matmul_output"], expected["qk_matmul_output"]
    if mode < 2 and "nonpad_kv_seqlen" in inputs:  # later keys are not read: -inf
        unread = np.arange(a.shape[-1]) >= inputs["nonpad_kv_seqlen"][:, None, None, None]
        e = np.where(unread, -np.inf, e)
    rounding = float(np.finfo(dtype).eps)
    assert_within(a, e, within.weights if mode == 3 else within.scores, rounding)


@settings(max_examples=400)
@given(case=cases())
def test_attention(case: Case, recipes: SimpleNamespace) -> None:
    agree(case, recipes.onnx_attention)


def small(**more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 2, length, 4)) for length in (3, 6, 6))
    return {"Q": q, "K": k, "V": v} | more


def test_the_window_drawn_in_the_text(recipes: SimpleNamespace) -> None:
    """Four queries, six keys, left 2, right 1: the picture in the operator's documentation."""
    uniform = {"Q": np.zeros((1, 1, 4, 2)), "K": np.ones((1, 1, 6, 2)), "V": np.ones((1, 1, 6, 2))}
    windows = {"left_window_size": 2, "right_window_size": 1, "qk_matmul_output_mode": 3}
    weights = recipes.onnx_attention(**uniform, **windows)[3][0, 0]
    seen = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert [list(np.flatnonzero(row)) for row in weights] == seen
    np.testing.assert_allclose(evaluate(uniform, windows)["qk_matmul_output"][0, 0], weights, rtol=1e-15)


def test_queries_before_the_first_key_give_zeros(recipes: SimpleNamespace) -> None:
    """Fewer real keys than queries: the offset is negative, the first rows see nothing."""
    inputs = small(nonpad_kv_seqlen=np.array([1, 6]))
    attributes = {"is_causal": 1, "qk_matmul_output_mode": 3}
    actual = recipes.onnx_attention(**inputs, **attributes)
    assert not actual[0][0, :, :2].any()
    assert actual[0][0, :, 2].all()
    agree((inputs, attributes), recipes.onnx_attention)


def test_a_mask_for_the_first_keys_only(recipes: SimpleNamespace) -> None:
    for width in (1, 4):
        for mask in (np.ones((3, width), bool), np.full((3, width), 0.5)):
            attributes = {"is_causal": 0, "qk_matmul_output_mode": 2}
            agree((small(attn_mask=mask), attributes), recipes.onnx_attention)


def test_mode_0_of_the_evaluator_is_capped() -> None:
    raw = evaluate(small(), {"softcap": 0.5, "qk_matmul_output_mode": 0})["qk_matmul_output"]
    capped = evaluate(small(), {"softcap": 0.5, "qk_matmul_output_mode": 1})["qk_matmul_output"]
    np.testing.assert_array_equal(raw, capped)


def test_causal_of_the_evaluator_has_as_many_rows_as_the_mask() -> None:
    causal = {"is_causal": 1, "qk_matmul_output_mode": 3}
    rows = evaluate(small(attn_mask=np.ones((3, 6), bool)), causal)["qk_matmul_output"]
    row = evaluate(small(attn_mask=np.ones((1, 6), bool)), causal)["qk_matmul_output"]
    assert np.count_nonzero(rows[0, 0, 2]) == 3
    assert np.count_nonzero(row[0, 0, 2]) == 1


def test_no_matrix_unless_asked_for(recipes: SimpleNamespace) -> None:
    assert recipes.onnx_attention(**small())[3] is None
