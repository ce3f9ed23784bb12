"""The recipes of docs/recipes.md, as they stand there, against the numbers of the libraries they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import names_of

DATA = np.load(Path(__file__).parent / "data" / "recipes.npz")

# Parts of some numbers were computed in float32 (see data/make_recipes.py).
WITHIN = {"exact": 1e-12, "single": 2e-6}


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """The functions that the page's Python blocks define."""
    return names_of("docs/recipes.md")


def arrays_of(model: str) -> dict[str, Any]:
    """Weights, x and output, in float64; config parsed."""
    arrays = {
        name.removeprefix(f"{model}/"): DATA[name] for name in DATA.files if name.startswith(f"{model}/")
    }
    config = json.loads(str(arrays.pop("config"))) if "config" in arrays else {}
    return {name: array.astype(np.float64) for name, array in arrays.items()} | {"config": config}


MASKED = np.arange(9) < np.array([9, 5])[:, None]

RECIPES: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"kv_lengths": [9, 5]}, "exact"),
    ("bert", {"attn_mask": MASKED[:, None, None, :]}, "exact"),
    ("gpt2", {"is_causal": True}, "exact"),
    ("vit", {}, "single"),
    ("llama", {"is_causal": True}, "single"),
    ("qwen2", {"is_causal": True}, "single"),
    ("qwen3", {"is_causal": True}, "single"),
    ("gemma2", {"is_causal": True}, "single"),
    ("gpt_oss", {"is_causal": True}, "single"),
]


@pytest.mark.parametrize(
    ("model", "call", "within"), RECIPES, ids=[f"{r[0]}-{'-'.join(r[1])}" for r in RECIPES]
)
def test_recipe(model: str, call: dict[str, Any], within: str, recipes: dict[str, Any], isa: str) -> None:
    arrays = arrays_of(model)
    layer = recipes[model](arrays, arrays["config"], 1)
    np.testing.assert_allclose(layer(arrays["x"], **call), arrays["output"], rtol=0, atol=WITHIN[within])
    single = layer.astype(np.float32)(arrays["x"].astype(np.float32), **call)
    np.testing.assert_allclose(single, arrays["output"], rtol=0, atol=1e-5)


def test_a_prefix_goes_before_every_name(recipes: dict[str, Any]) -> None:
    for model, call, within in RECIPES:
        arrays = arrays_of(model)
        renamed = {f"model.{name}": array for name, array in arrays.items()}
        layer = recipes[model](renamed, arrays["config"], 1, prefix="model.")
        np.testing.assert_allclose(layer(arrays["x"], **call), arrays["output"], rtol=0, atol=WITHIN[within])


def test_older_configurations(recipes: dict[str, Any]) -> None:
    """rope_theta and rope_scaling apart, as files before rope_parameters have them."""
    arrays = arrays_of("llama")
    scaling = dict(arrays["config"].pop("rope_parameters"))
    arrays["config"] |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    output = recipes["llama"](arrays, arrays["config"], 1)(arrays["x"], is_causal=True)
    np.testing.assert_allclose(output, arrays["output"], rtol=0, atol=WITHIN["single"])


def test_fused_vit(recipes: dict[str, Any]) -> None:
    arrays = arrays_of("vit")
    name = "encoder.layer.1.attention"
    fused = {"blocks.1.attn.proj.weight": arrays[f"{name}.output.dense.weight"]}
    fused["blocks.1.attn.proj.bias"] = arrays[f"{name}.output.dense.bias"]
    for kind in ("weight", "bias"):
        parts = [arrays[f"{name}.attention.{part}.{kind}"] for part in ("query", "key", "value")]
        fused[f"blocks.1.attn.qkv.{kind}"] = np.concatenate(parts)
    layer = recipes["vit_fused"](fused, 4, 1)
    np.testing.assert_allclose(layer(arrays["x"]), arrays["output"], rtol=0, atol=WITHIN["single"])


@pytest.mark.parametrize("model", ["torch", "torch_cross"])
def test_torch(model: str, recipes: dict[str, Any], isa: str) -> None:
    arrays = arrays_of(model)
    layer = recipes["torch_attention"](arrays, 4)
    output, weights = layer(arrays["x"], arrays["context"], return_weights=True)
    np.testing.assert_allclose(output, arrays["output"], rtol=0, atol=WITHIN["exact"])
    np.testing.assert_allclose(weights, arrays["weights"], rtol=0, atol=WITHIN["exact"])
