"""The executable specification: every public function of npattn in plain NumPy and float64.

Written to be read beside the formula it computes, not to be fast. Signatures and defaults are those of the
public functions, without ``out``. Inputs of any dtype are computed, and returned, in float64 (``split_heads``
and ``merge_heads`` only move elements and keep the dtype). Arguments are trusted: the checks and their
messages live in the public functions.

Examples
--------
>>> import numpy as np
>>> from npattn import reference
>>> query, key, value = np.zeros((1, 2)), np.ones((2, 2)), np.array([[1.0], [3.0]])
>>> reference.scaled_dot_product_attention(query, key, value)
array([[2.]])
"""

from __future__ import annotations

from npattn._summary import AttentionSummary

from .attention import attention_scores, attention_weights, scaled_dot_product_attention
from .heads import merge_heads, split_heads
from .matmul import matmul, pack_matrix
from .partial import merge_attention, varlen_attention
from .positions import alibi_slopes, sinusoidal_encoding
from .rope import apply_rope, rope_cos_sin, rotary_embedding
from .rope_scaling import rope_frequencies
from .softmax import log_softmax, logsumexp, softmax
from .summary import attention_summary

__all__ = [
    "AttentionSummary",
    "alibi_slopes",
    "apply_rope",
    "attention_scores",
    "attention_summary",
    "attention_weights",
    "log_softmax",
    "logsumexp",
    "matmul",
    "merge_attention",
    "merge_heads",
    "pack_matrix",
    "rope_cos_sin",
    "rope_frequencies",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "sinusoidal_encoding",
    "softmax",
    "split_heads",
    "varlen_attention",
]


def __dir__() -> list[str]:
    return sorted(__all__)
