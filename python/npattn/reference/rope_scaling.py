"""The inverse frequencies of RoPE and their scaling types, a pair of elements at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._common import Array


def rope_frequencies(
    dim: int, *, base: float = 10000.0, scaling: Mapping[str, Any] | None = None, length: int | None = None
) -> tuple[Array, float]:
    """f_i = base^(-2i/dim), i < dim // 2, changed by the type of ``scaling``; and the attention factor.

    The keys are those of Hugging Face's config.json. ``length``: the length in use, for dynamic and longrope.
    """
    keys = {name: given for name, given in (scaling or {}).items() if given is not None}
    kind = rope_type(keys)
    base = keys.get("rope_theta", base)
    if kind == "dynamic":
        base = dynamic_base(dim, base, keys, length)
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    change = {"linear": linear, "llama3": llama3, "proportional": proportional}
    if kind == "yarn":
        return np.array(yarn(plain, dim, base, keys)), yarn_factor(keys)
    if kind == "longrope":
        return np.array(longrope(plain, keys, length)), longrope_factor(keys)
    return np.array(change[kind](plain, keys) if kind in change else plain), 1.0


def rope_type(scaling: Mapping[str, Any]) -> str:
    """The type of a scaling dictionary, in its newer or its older spelling."""
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def original_length(keys: Mapping[str, Any]) -> float:
    """The length the model was first trained on."""
    own = "original_max_position_embeddings"
    return float(keys[own if own in keys else "max_position_embeddings"])


def extension(keys: Mapping[str, Any]) -> float:
    """By how much the length was extended: ``factor``, or the ratio of the two lengths."""
    ratio = keys.get("max_position_embeddings", math.nan) / original_length(keys)
    return float(keys.get("factor", ratio))


def linear(plain: list[float], keys: Mapping[str, Any]) -> list[float]:
    """f_i / factor: all positions are squeezed alike."""
    return [f / keys["factor"] for f in plain]


def proportional(plain: list[float], keys: Mapping[str, Any]) -> list[float]:
    """f_i / factor for the first part, ``partial_rotary_factor``, of the pairs; the others do not turn."""
    turning = int(keys.get("partial_rotary_factor", 1.0) * len(plain))
    return [f / keys.get("factor", 1.0) if i < turning else 0.0 for i, f in enumerate(plain)]


def dynamic_base(dim: int, base: float, keys: Mapping[str, Any], length: int | None) -> float:
    """base * (factor * L / M - (factor - 1))^(dim / (dim - 2)), L the length in use if longer than M."""
    limit, factor = keys["max_position_embeddings"], keys["factor"]
    stretch = factor * max(length or 0, limit) / limit - (factor - 1.0)
    return float(base * stretch ** (dim / (dim - 2))) if dim > 2 else base


def yarn(plain: list[float], dim: int, base: float, keys: Mapping[str, Any]) -> list[float]:
    """f_i for fast pairs, f_i / factor for slow ones, a linear ramp over i between them (Peng et al. 2023).

    A pair turns r times in the original length M at i(r) = dim ln(M / (2 pi r)) / (2 ln base); the ramp runs
    from i(beta_fast) to i(beta_slow), rounded outwards if ``truncate``.
    """
    low, high = (
        dim * math.log(original_length(keys) / (2.0 * math.pi * turns)) / (2.0 * math.log(base))
        for turns in (keys.get("beta_fast") or 32, keys.get("beta_slow") or 1)
    )
    if keys.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slow = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return [f / extension(keys) * s + f * (1.0 - s) for f, s in zip(plain, slow, strict=True)]


def yarn_factor(keys: Mapping[str, Any]) -> float:
    """0.1 ln(factor) + 1; with both mscales the ratio of 0.1 m ln(factor) + 1 for them; or as given."""
    if "attention_factor" in keys:
        return float(keys["attention_factor"])
    grown = 0.1 * math.log(max(extension(keys), 1.0))
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return float((keys["mscale"] * grown + 1.0) / (keys["mscale_all_dim"] * grown + 1.0))
    return grown + 1.0


def longrope(plain: list[float], keys: Mapping[str, Any], length: int | None) -> list[float]:
    """f_i / long_factor_i once the length in use is past the original one, f_i / short_factor_i before."""
    divisors = keys["long_factor"] if (length or 0) > original_length(keys) else keys["short_factor"]
    return [f / divisor for f, divisor in zip(plain, divisors, strict=True)]


def longrope_factor(keys: Mapping[str, Any]) -> float:
    """sqrt(1 + ln(factor) / ln(original length)), or as given."""
    if "attention_factor" in keys:
        return float(keys["attention_factor"])
    return math.sqrt(1.0 + math.log(max(extension(keys), 1.0)) / math.log(original_length(keys)))


def llama3(plain: list[float], keys: Mapping[str, Any]) -> list[float]:
    """f_i where a pair turns more than high_freq_factor times in the original length, f_i / factor where less
    than low_freq_factor times, and between them a blend that is linear in the number of turns.
    """
    low, high = keys["low_freq_factor"], keys["high_freq_factor"]
    turns = [original_length(keys) * f / (2.0 * math.pi) for f in plain]
    blend = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [(1.0 - b) * f / keys["factor"] + b * f for f, b in zip(plain, blend, strict=True)]
