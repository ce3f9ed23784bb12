"""torch as an oracle where it is installed: scaled_dot_product_attention and nn.MultiheadAttention."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import npattn
import numpy as np
import pytest
from other_process import Call, answers
from support import DTYPES, assert_within, each_isa, tolerances_of
from tolerances import BFLOAT16, largest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; where it is, its attention is the oracle", allow_module_level=True)

SDPA = 40
MODULES = 12


def sdpa_call(seed: int) -> Call:
    """Random shapes and options, as torch takes them: a mask or causal, not both."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = ((4, 4), (4, 2), (6, 1))[seed % 3]
    leading = ((), (2,), (2, 3))[rng.integers(3)]
    query_len, key_len = rng.integers(1, 40, 2)
    head_dim, value_dim = rng.choice([1, 8, 17, 32], 2)
    call: Call = {
        "query": rng.standard_normal((*leading, heads, query_len, head_dim)),
        "key": rng.standard_normal((*leading, kv_heads, key_len, head_dim)),
        "value": rng.standard_normal((*leading, kv_heads, key_len, value_dim)),
        "enable_gqa": heads != kv_heads,
        "scale": (None, 0.3, -0.7, 0.0)[rng.integers(4)],
    }
    kind = ("plain", "causal", "bool", "float", "float with -inf")[seed % 5]
    if kind == "causal":
        call["is_causal"] = True
    elif kind != "plain":
        shape = ((query_len, key_len), (heads, query_len, key_len), (1, key_len))[rng.integers(3)]
        mask = rng.standard_normal(shape)
        mask[..., -1, :] = -2.0  # hides everything from the last query, but where it is an ordinary number
        if kind == "bool":
            mask = mask > -0.5
        elif kind == "float with -inf":
            mask = np.where(mask < -0.5, -np.inf, mask)
        call["attn_mask"] = mask
    return call


def mha_call(seed: int) -> Call:
    rng = np.random.default_rng(seed)
    batch, num_heads, query_len, key_len = 3, (1, 2, 4)[seed % 3], 5, 7
    kdim = None if seed % 2 else 20
    call: Call = {
        "query": rng.standard_normal((batch, query_len, 16)),
        "key": rng.standard_normal((batch, key_len, kdim or 16)),
        "num_heads": num_heads,
        "seed": seed,
        "bias": bool(seed % 4),
        "kdim": kdim,
    }
    if seed % 3:
        call["key_padding_mask"] = np.arange(key_len) >= rng.integers(2, key_len, (batch, 1))
    if seed % 4 == 1:
        shape = ((query_len, key_len), (batch * num_heads, query_len, key_len))[seed % 3 % 2]
        call["attn_mask"] = rng.standard_normal(shape) > 0.8
        call["attn_mask"][..., 0] = False
    elif seed % 4 == 2 and "key_padding_mask" not in call:  # torch wants both of one dtype
        call["attn_mask"] = rng.standard_normal((query_len, key_len))
    return call


def widened(call: Call, dtype: np.dtype[Any]) -> Call:
    """The call with its query, key and value rounded to ``dtype``, in float64."""
    rounded = {name: call[name].astype(dtype).astype(np.float64) for name in ("query", "key", "value")}
    return call | rounded


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Every answer torch has to give, in float64, of inputs rounded to each dtype."""
    sdpa = [
        {"function": "sdpa", **widened(sdpa_call(seed), dtype)}
        for dtype in DTYPES.values()
        for seed in range(SDPA)
    ]
    mha = [{"function": "mha", **mha_call(seed)} for seed in range(MODULES)]
    corner = {"function": "lower_right"}
    corners = [corner | call for call in corner_calls()]
    given = answers("worker_torch.py", sdpa + mha + corners)
    return {
        "sdpa": given[: len(sdpa)],
        "mha": given[len(sdpa) : len(sdpa) + len(mha)],
        "lower_right": given[len(sdpa) + len(mha) :],
    }


def corner_calls() -> list[Call]:
    rng = np.random.default_rng(0)
    calls = []
    for query_len, key_len in ((5, 9), (7, 7)):
        key, value = rng.standard_normal((2, 2, 3, key_len, 8))
        calls.append({"query": rng.standard_normal((2, 3, query_len, 8)), "key": key, "value": value})
    return calls


@pytest.mark.parametrize("seed", range(SDPA))
def test_sdpa(seed: int, expected: dict[str, list[Any]], recipes: SimpleNamespace) -> None:
    for number, dtype in enumerate(DTYPES.values()):
        answer = expected["sdpa"][number * SDPA + seed]
        call = sdpa_call(seed)
        del call["enable_gqa"]
        query, key, value = (call.pop(name).astype(dtype) for name in ("query", "key", "value"))
        added = call.get("attn_mask", np.zeros(1))
        within = tolerances_of(query, key, value, scale=call["scale"], added=largest(added))
        for _ in each_isa():
            actual = recipes.torch_sdpa(query, key, value, **call)
            assert actual.dtype == dtype
            # A bfloat16 output is rounded once more than the formula's weights.
            more = 2.0**-8 * largest(answer) if dtype == BFLOAT16 else 0.0
            assert_within(actual, answer, within.output + more)


def test_lower_right(expected: dict[str, list[Any]]) -> None:
    for call, answer in zip(corner_calls(), expected["lower_right"], strict=True):
        offset = call["key"].shape[-2] - call["query"].shape[-2]
        actual = npattn.scaled_dot_product_attention(**call, is_causal=True, query_offset=offset)
        np.testing.assert_allclose(actual, answer, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(MODULES))
def test_multihead_attention(seed: int, expected: dict[str, list[Any]], recipes: SimpleNamespace) -> None:
    call, answer = mha_call(seed), expected["mha"][seed]
    layer = npattn.MultiHeadAttention.from_torch(answer["state"], call["num_heads"])
    masks = {name: call[name] for name in ("key_padding_mask", "attn_mask") if name in call}
    for _ in each_isa():
        output, weights = recipes.torch_mha(layer, call["query"], call["key"], **masks)
        np.testing.assert_allclose(output, answer["output"], rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights, answer["weights"], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(answer["from_tensors"], layer(call["query"], call["key"]))
    for name, actual in answer["from_half_tensors"].items():
        state = {key: array.astype(np.float32).astype(DTYPES[name]) for key, array in answer["state"].items()}
        half = npattn.MultiHeadAttention.from_torch(state, call["num_heads"])
        assert half.dtype == DTYPES[name]
        np.testing.assert_array_equal(actual, half(call["query"], call["key"]))
