"""Attention of torch on NumPy arrays; run by test_torch.py."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import npattn
import numpy as np
import torch
from other_process import serve
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


def tensor(x: Any) -> Any:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def sdpa(**arguments: Any) -> np.ndarray:
    """By the implementation of the formula: the CPU's fused one gives NaN for causal with scale <= 0."""
    tensors = {name: tensor(x) for name, x in arguments.items()}
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(**tensors).numpy()


def lower_right(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    mask = causal_lower_right(query.shape[-2], key.shape[-2])
    return sdpa(query=query, key=key, value=value, attn_mask=mask)


def mha(
    query: np.ndarray, key: np.ndarray, num_heads: int, seed: int, bias: bool, kdim: int | None, **masks: Any
) -> dict[str, Any]:
    """A seeded module's output and weights, its state, and what from_torch makes of its tensors."""
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(
        query.shape[-1], num_heads, bias=bias, kdim=kdim, vdim=kdim, batch_first=True, dtype=torch.float64
    )
    for parameter in module.parameters():  # torch starts biases at 0
        torch.nn.init.normal_(parameter, std=0.3)
    module.eval()
    with torch.no_grad():
        masks = {name: tensor(x) for name, x in masks.items()}
        output, weights = module(tensor(query), tensor(key), tensor(key), **masks)
        layer = npattn.MultiHeadAttention.from_torch(module.state_dict(), num_heads)
        state = {name: x.numpy() for name, x in module.state_dict().items()}
        halves = {}
        for dtype in ("float16", "bfloat16") if find_spec("ml_dtypes") else ("float16",):
            rounded = {name: x.float().to(getattr(torch, dtype)) for name, x in module.state_dict().items()}
            halves[dtype] = npattn.MultiHeadAttention.from_torch(rounded, num_heads)(query, key)
    return {
        "output": output.numpy(),
        "weights": weights.numpy(),
        "state": state,
        "from_tensors": layer(query, key),
        "from_half_tensors": halves,
    }


def answer(function: str, **arguments: Any) -> Any:
    return {"sdpa": sdpa, "lower_right": lower_right, "mha": mha}[function](**arguments)


if __name__ == "__main__":
    serve(answer)
