"""Exact attention for NumPy on the CPU.

>>> import numpy as np
>>> import npattn
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 128, 64))
>>> npattn.scaled_dot_product_attention(q, k, v).shape
(8, 128, 64)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npattn import isa  # first: npattn._threads, which it imports, loads the core
from npattn._attention import attention_scores, attention_weights, scaled_dot_product_attention
from npattn._cache import KVCache
from npattn._heads import merge_heads, split_heads
from npattn._layer import MultiHeadAttention
from npattn._matmul import PackedMatrix, matmul, pack_matrix
from npattn._merge import merge_attention
from npattn._paged_cache import PagedKVCache
from npattn._positions import alibi_slopes, rope_cos_sin, sinusoidal_encoding
from npattn._rope import apply_rope, rotary_embedding
from npattn._rope_scaling import rope_frequencies
from npattn._softmax import log_softmax, logsumexp, softmax
from npattn._summary import AttentionSummary, attention_summary
from npattn._threads import _core, get_num_threads, set_num_threads, threads
from npattn._varlen import varlen_attention

if TYPE_CHECKING:
    from npattn import inspect, models, reference
    from npattn._info import show_config

__version__: str = _core.__version__

_LAZY = {"inspect": None, "models": None, "reference": None, "show_config": "_info"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'npattn' has no attribute {name!r}")
    module = import_module(f"npattn.{_LAZY[name] or name}")
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "AttentionSummary",
    "KVCache",
    "MultiHeadAttention",
    "PackedMatrix",
    "PagedKVCache",
    "alibi_slopes",
    "apply_rope",
    "attention_scores",
    "attention_summary",
    "attention_weights",
    "get_num_threads",
    "inspect",
    "isa",
    "log_softmax",
    "logsumexp",
    "matmul",
    "merge_attention",
    "merge_heads",
    "models",
    "pack_matrix",
    "reference",
    "rope_cos_sin",
    "rope_frequencies",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "sinusoidal_encoding",
    "softmax",
    "split_heads",
    "threads",
    "varlen_attention",
]
