"""ONNX RotaryEmbedding, opset 23: the reference evaluator of the onnx package as an oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import npattn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, assert_within, each_isa
from tolerances import largest, tolerance

pytest.importorskip("onnx", minversion="1.23", reason="needs onnx 1.23 or later (extra test)")

from onnx_evaluator import evaluate

NAMES = (("X", "cos_cache", "sin_cache", "position_ids"), ("Y",))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 9))
    head_dim = 2 * draw(st.integers(1, 36))
    attributes: dict[str, Any] = {"interleaved": draw(st.integers(0, 1))}
    rotary_dim = 2 * draw(st.integers(0, head_dim // 2))  # 0: the whole width
    if rotary_dim or draw(st.booleans()):
        attributes["rotary_embedding_dim"] = rotary_dim
    x = rng.standard_normal((batch, heads, length, head_dim))
    if draw(st.booleans()):
        x = x.swapaxes(1, 2).reshape(batch, length, -1)
        attributes["num_heads"] = heads
    inputs = {"X": x}
    if draw(st.booleans()):
        positions = np.arange(draw(st.integers(1, 50)))
        inputs["position_ids"] = rng.integers(0, positions.size, (batch, length))
    else:
        positions = rng.integers(0, 5000, (batch, length))
    cos, sin = npattn.rope_cos_sin(positions, rotary_dim or head_dim, dtype=np.float64)
    return inputs | {"cos_cache": cos, "sin_cache": sin}, attributes


@settings(max_examples=150)
@given(case=cases())
def test_rotary_embedding(
    case: tuple[dict[str, np.ndarray], dict[str, Any]], recipes: SimpleNamespace
) -> None:
    inputs, attributes = case
    for name, dtype in DTYPES.items():
        if name == "bfloat16":
            continue  # not a type of the evaluator's NumPy
        rounded = {key: x.astype(dtype) if key != "position_ids" else x for key, x in inputs.items()}
        exact = {key: x.astype(np.float64) if x.dtype == dtype else x for key, x in rounded.items()}
        expected = evaluate("RotaryEmbedding", 23, NAMES, exact, attributes)["Y"]
        for _ in each_isa():
            actual = recipes.onnx_rotary_embedding(**rounded, **attributes)
            assert actual.dtype == dtype
            assert_within(actual, expected, tolerance(dtype, 2, 2 * largest(exact["X"])))
