"""jax.nn.dot_product_attention as an oracle where JAX is installed. Its softmax is in float32, always."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import npattn
import numpy as np
import pytest
from other_process import Call, answers
from support import each_isa

if find_spec("jax") is None:
    pytest.skip("JAX is not installed; where it is, its attention is the oracle", allow_module_level=True)

CALLS = 24

# Few, as JAX compiles anew for each: batch, heads, kv heads, query length, key length, head dim.
SHAPES = ((2, 4, 2, 9, 6, 8), (3, 3, 3, 5, 17, 4))


def call_of(seed: int) -> Call:
    rng = np.random.default_rng(seed)
    batch, heads, kv_heads, query_len, key_len, head_dim = SHAPES[seed % 2]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    call: Call = {
        "query": normal(batch, query_len, heads, head_dim),
        "key": normal(batch, key_len, kv_heads, head_dim),
        "value": normal(batch, key_len, kv_heads, head_dim),
        "is_causal": bool(rng.integers(2)),
        "scale": (None, 0.3, -0.7)[rng.integers(3)],
        "local_window_size": (None, None, 2, (3, 1), (0, 4))[seed % 5],
    }
    if rng.integers(2):
        call["bias"] = 2 * normal(1, heads, query_len, key_len)
    if rng.integers(2):
        call["mask"] = normal(batch, 1, query_len, key_len) > -0.7
    if rng.integers(2):
        call["key_value_seq_lengths"] = rng.integers(1, key_len + 1, batch).astype(np.int32)
    if rng.integers(2):
        call["query_seq_lengths"] = rng.integers(0, query_len + 1, batch).astype(np.int32)
    return call


def visible(call: Call) -> np.ndarray:
    """(batch, heads, Lq): which queries see a key."""
    (batch, query_len, heads, _), key_len = call["query"].shape, call["key"].shape[1]
    p, j = np.mgrid[:query_len, :key_len]
    allowed = np.ones((batch, heads, query_len, key_len), bool) & call.get("mask", np.True_)
    if call["is_causal"]:
        allowed &= j <= p
    window = call["local_window_size"]
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        allowed &= (p - left <= j) & (j <= p + right)
    for name, places in (("key_value_seq_lengths", j), ("query_seq_lengths", p)):
        if name in call:
            allowed &= places < call[name][:, None, None, None]
    return allowed.any(axis=-1)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return answers("worker_jax.py", [call_of(seed) for seed in range(CALLS)])


@pytest.mark.parametrize("seed", range(CALLS))
def test_dot_product_attention(seed: int, expected: list[Any], recipes: SimpleNamespace) -> None:
    call, (output, _) = call_of(seed), expected[seed]
    sees = visible(call).swapaxes(1, 2)
    for _ in each_isa():
        actual = recipes.jax_dot_product_attention(**call)
        np.testing.assert_allclose(actual[sees], output[sees], rtol=0, atol=1e-5)
        assert not actual[~sees].any()


def test_log_sum_exp(expected: list[Any]) -> None:
    """(batch, Lq, heads) there; a query that sees no key has a large negative number instead of -inf."""
    for seed in range(CALLS):
        call, (_, lse) = call_of(seed), expected[seed]
        if call["local_window_size"] is None and not any("lengths" in name for name in call):
            actual = npattn.scaled_dot_product_attention(
                *(call[name] for name in ("query", "key", "value")),
                call.get("mask"),
                bias=call.get("bias"),
                is_causal=call["is_causal"],
                query_offset=0,
                scale=call["scale"],
                layout="BSHD",
                return_lse=True,
            )[1]
            sees = visible(call)
            np.testing.assert_allclose(actual[sees], lse.swapaxes(1, 2)[sees], rtol=1e-6, atol=1e-5)
            assert np.isneginf(actual[~sees]).all()
            assert (lse.swapaxes(1, 2)[~sees] < -1e30).all()


def test_a_query_without_keys_is_the_mean_of_all_values(expected: list[Any]) -> None:
    """There, not here: the difference the page names."""
    found = 0
    for seed in range(CALLS):
        call, (output, _) = call_of(seed), expected[seed]
        if "query_seq_lengths" in call:
            continue  # zeros, then
        for batch, query, head in np.argwhere(~visible(call).swapaxes(1, 2)):
            group = call["query"].shape[2] // call["key"].shape[2]
            mean = call["value"][batch, :, head // group].mean(axis=0)
            np.testing.assert_allclose(output[batch, query, head], mean, rtol=0, atol=1e-5)
            found += 1
    assert found
