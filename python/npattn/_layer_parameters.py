"""What a layer is made of and called with, checked; weights by chance and out of torch's dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _check
from ._cache import KVCache
from ._layer_state import LayerState

Array = NDArray[Any]


def parameter(name: str, value: ArrayLike, shape: tuple[int | None, ...]) -> Array:
    """A weight or bias of the given shape, where None is any size above zero."""
    array = _check.as_array(name, value)
    fits = array.ndim == len(shape) and all(
        have == want or (want is None and have > 0) for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = str(tuple("any" if size is None else size for size in shape)).replace("'", "")
        raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")
    return array


def sequence(name: str, value: ArrayLike, width: int) -> Array:
    """An input of shape (..., length, width)."""
    array = _check.as_array(name, value)
    if array.ndim < 2 or array.shape[-1] != width:
        raise ValueError(f"{name} must have shape (..., length, {width}), got {array.shape}")
    return array


def head_counts(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    """Both counts, checked; kv heads are as many as heads unless given."""
    heads = _check.as_integer("num_heads", num_heads, minimum=1)
    kv_heads = heads if num_kv_heads is None else _check.as_integer("num_kv_heads", num_kv_heads, minimum=1)
    if heads % kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}")
    return heads, kv_heads


def per_head(what: str, width: int, heads: str, num_heads: int) -> int:
    """The width of one head, where the argument ``what`` has ``width`` columns for all of them."""
    if width < 1 or width % num_heads:
        raise ValueError(f"{what} must be a positive multiple of {heads}={num_heads}, got {width}")
    return width // num_heads


def positive(name: str, value: Any) -> float:
    """A number above zero."""
    number = _check.as_number(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be above 0, got {number:g}")
    return number


def common_leading(x: Array, context: Array) -> tuple[int, ...]:
    """The batch axes of both, broadcast."""
    try:
        return np.broadcast_shapes(x.shape[:-2], context.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the batch axes of x {x.shape} and context {context.shape} do not broadcast: they must be "
            "equal, 1 or missing"
        ) from None


def check_cache(layer: LayerState, cache: KVCache, x: Array, dtype: np.dtype[Any]) -> None:
    """TypeError or ValueError unless the cache can take what the layer makes of x, computed in `dtype`."""
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache must be a KVCache, got {type(cache).__name__} (the calls of a PagedKVCache name its "
            "sequences: use its append and attend with projections of your own)"
        )
    for name in ("num_kv_heads", "head_dim", "value_dim"):
        have, want = getattr(cache, name), getattr(layer, name)
        if have != want:
            raise ValueError(f"the cache has {name}={have}, the layer {name}={want}")
    if not cache._takes(dtype) or _check.halves_mix(dtype, cache.dtype):
        raise TypeError(
            f"the layer computes in {dtype} (its weights are {layer.dtype}, x is {x.dtype}), the cache holds "
            f'{cache.dtype}: make it with KVCache(..., dtype="{dtype}")'
        )
    if layer._rope is not None and cache._rope is not None:
        raise ValueError("the layer and the cache both have rope, and would turn each key twice")
    if layer.context_dim != layer.embed_dim:
        raise ValueError(
            f"a cache holds keys of x, which has {layer.embed_dim} features; the layer makes them of a "
            f"context's {layer.context_dim}"
        )
    if x.ndim > 3 or (x.shape[0] if x.ndim == 3 else 1) != cache.batch:
        raise ValueError(
            f"x has shape {x.shape}; with a cache of batch {cache.batch} it must be ({cache.batch}, length, "
            f"{layer.embed_dim})"
        )


def generator(rng: Any) -> np.random.Generator:
    """`rng` itself, or a generator with that seed."""
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        message = (
            f"rng must be None, a seed (an integer of at least 0) or a numpy.random.Generator, got {rng!r}"
        )
        raise type(error)(message) from None


def random_parameters(
    embed_dim: int, kv_dim: int, bias: bool, rng: Any, dtype: np.dtype[Any]
) -> dict[str, Any]:
    """w_q, w_k, w_v, w_o (and b_q, ...) of a layer: U(+-sqrt(6 / (in + out))) and U(+-1 / sqrt(in))."""
    rng, bias = generator(rng), _check.as_flag("bias", bias)
    parameters: dict[str, Array] = {}
    for name, width in (("q", embed_dim), ("k", kv_dim), ("v", kv_dim), ("o", embed_dim)):
        limit = np.sqrt(6.0 / (embed_dim + width))
        parameters[f"w_{name}"] = rng.uniform(-limit, limit, (embed_dim, width)).astype(dtype)
        if bias:
            limit = 1.0 / np.sqrt(embed_dim)
            parameters[f"b_{name}"] = rng.uniform(-limit, limit, width).astype(dtype)
    return parameters


def torch_parameters(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """w_q, w_k, w_v, w_o (and b_q, ...) of a layer, from the names of ``torch.nn.MultiheadAttention``."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to arrays, got {type(state_dict).__name__}")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {prefix!r}")
    for name in ("bias_k", "bias_v"):
        if state_dict.get(prefix + name) is not None:
            raise ValueError(
                f"state_dict has {prefix + name!r} (add_bias_kv), which this layer has no place for"
            )
    if prefix + "q_proj_weight" in state_dict:
        w_q, w_k, w_v = (_from_torch(state_dict, f"{prefix}{letter}_proj_weight") for letter in "qkv")
    else:
        w_q, w_k, w_v = _thirds(state_dict, prefix + "in_proj_weight", ndim=2)
    w_o = _from_torch(state_dict, prefix + "out_proj.weight")
    parameters = {"w_q": w_q.T, "w_k": w_k.T, "w_v": w_v.T, "w_o": w_o.T}
    if state_dict.get(prefix + "in_proj_bias") is not None:
        biases = _thirds(state_dict, prefix + "in_proj_bias", ndim=1)
        parameters.update(zip(("b_q", "b_k", "b_v"), biases, strict=True))
    if state_dict.get(prefix + "out_proj.bias") is not None:
        parameters["b_o"] = _from_torch(state_dict, prefix + "out_proj.bias")
    return parameters


def _thirds(state_dict: Mapping[str, Any], name: str, *, ndim: int) -> list[Array]:
    """What torch keeps in one array for query, key and value: (3 * E, E), or (3 * E,)."""
    array = _from_torch(state_dict, name)
    if array.ndim != ndim or array.shape[0] % 3 or (ndim == 2 and array.shape[0] != 3 * array.shape[1]):
        wanted = "(3 * embed_dim, embed_dim)" if ndim == 2 else "(3 * embed_dim,)"
        raise ValueError(f"state_dict[{name!r}] must have shape {wanted}, got {array.shape}")
    return np.split(array, 3)


def _from_torch(state_dict: Mapping[str, Any], name: str) -> Array:
    if name not in state_dict:
        last = "out_proj.weight"
        prefixes = [key.removesuffix(last) for key in state_dict if key.endswith(last)]
        hint = f"; it has a layer under prefix={prefixes[0]!r}" if prefixes else ""
        raise ValueError(f"state_dict has no {name!r}{hint}")
    tensor, where = state_dict[name], f"state_dict[{name!r}]"
    if hasattr(tensor, "detach"):  # a parameter that requires a gradient refuses to become an array
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # which torch does not make an array of
            return np.asarray(tensor.float()).astype(_bfloat16(where))
    return _check.as_array(where, tensor)


def _bfloat16(where: str) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise TypeError(
            f"{where} is bfloat16, which NumPy has with ml_dtypes only: pip install ml_dtypes, or convert "
            "the tensors with .float()"
        ) from None
    return found
