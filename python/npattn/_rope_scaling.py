"""The inverse frequencies of RoPE and the scaling types of Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._check import as_flag, as_integer, as_number

Array = NDArray[np.float64]
Keys = dict[str, Any]

DEFAULT_BASE = 10000.0

# Every type may carry these; partial_rotary_factor says how much of a head is turned (see rotary_width),
# mrope_section which pairs take which row of positions (see rope_sections).
COMMON_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "mrope_section",
)


def rope_frequencies(
    dim: int,
    *,
    base: float = DEFAULT_BASE,
    scaling: Mapping[str, Any] | None = None,
    length: int | None = None,
) -> tuple[Array, float]:
    """Inverse frequencies of rotary position embedding, base^(-2i/dim), changed by a scaling type.

    Parameters
    ----------
    dim : int
        The width that is turned, even: the head dimension, or its part where only a part is turned.
    base : float
        The longest wavelength over 2 pi. A ``rope_theta`` in ``scaling`` replaces the default and must equal
        any other base.
    scaling : mapping, optional
        The ``rope_scaling`` (or ``rope_parameters``) dictionary of a config.json. ``rope_type`` or ``type``
        is "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", or "mrope", whose
        frequencies are the default ones; the other keys are those of that type,
        ``max_position_embeddings`` among them where a formula needs it: for dynamic, and where ``factor`` is
        not given. ``partial_rotary_factor`` matters here for "proportional" only; for the other types
        ``dim`` already is the part that is turned. ``mrope_section`` is for `rope_cos_sin`.
    length : int, optional
        The length in use. "dynamic" scales once it exceeds ``max_position_embeddings``, "longrope" takes its
        long factors once it exceeds ``original_max_position_embeddings``; None is a short one.

    Returns
    -------
    inv_freq : ndarray of float64, (dim // 2,)
        Radians a position for each pair of elements.
    attention_factor : float
        What cos and sin are multiplied with: 1.0 but for yarn and longrope.

    Raises
    ------
    ValueError
        For an odd or non-positive dim, an unknown type or key, a missing key, a value out of range, a
        ``rope_theta`` that contradicts ``base``.
    TypeError
        For a scaling that is no mapping, or values that are no numbers.

    Notes
    -----
    Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN, and dynamic NTK); Ding et al. 2024 (LongRoPE). The types,
    keys and defaults are those of ``transformers.modeling_rope_utils``.

    Examples
    --------
    >>> import npattn
    >>> inv_freq, factor = npattn.rope_frequencies(4, scaling={"rope_type": "linear", "factor": 2.0})
    >>> inv_freq, factor
    (array([0.5  , 0.005]), 1.0)
    """
    dim = as_integer("dim", dim, minimum=2)
    if dim % 2:
        raise ValueError(f"dim must be even, RoPE turns pairs of elements; got {dim}")
    kind, keys = parse_scaling(scaling)
    base = rope_base(base, keys)
    length = 0 if length is None else as_integer("length", length, minimum=0)
    return TYPES[kind].frequencies(dim, base, keys, length)


def rotary_width(head_dim: int, rotary_dim: int | None, scaling: Mapping[str, Any] | None) -> int:
    """How many elements of a head of ``head_dim`` are turned: rotary_dim, the scaling's part, or all.

    "proportional" turns the whole width, some of it by nothing: there partial_rotary_factor is no width.
    """
    kind, keys = parse_scaling(scaling)
    part = keys.get("partial_rotary_factor")
    width = head_dim if part is None or kind == "proportional" else int(head_dim * part)
    if rotary_dim is None:
        return width
    rotary_dim = as_integer("rotary_dim", rotary_dim, minimum=0)
    if part is not None and rotary_dim != width:
        raise ValueError(
            f"rotary_dim is {rotary_dim}, but scaling['partial_rotary_factor'] = {part:g} turns {width} of "
            f"{head_dim} elements; leave one of them out"
        )
    return rotary_dim


def rope_sections(sections: Sequence[int] | None, scaling: Mapping[str, Any] | None) -> list[int] | None:
    """How many pairs each row of positions turns: sections, the scaling's ``mrope_section``, or None."""
    _, keys = parse_scaling(scaling)
    given = {"sections": sections, "scaling['mrope_section']": keys.get("mrope_section")}
    sizes = {name: _section_sizes(name, value) for name, value in given.items() if value is not None}
    if len(sizes) == 2 and sizes["sections"] != sizes["scaling['mrope_section']"]:
        raise ValueError(
            f"sections is {sections}, but scaling['mrope_section'] is {keys['mrope_section']}; leave one of "
            "them out"
        )
    return next(iter(sizes.values()), None)


def _section_sizes(name: str, given: Any) -> list[int]:
    if isinstance(given, (str, Mapping)) or np.ndim(given) != 1:
        raise TypeError(f"{name} must be a list of integers, got {given!r}")
    return [as_integer(f"{name}[{n}]", size, minimum=0) for n, size in enumerate(given)]


def parse_scaling(scaling: Mapping[str, Any] | None) -> tuple[str, Keys]:
    """The type of a scaling dictionary and its keys, checked; keys that hold None are absent."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling must be a dict as in config.json, or None; got {scaling!r}")
    keys = {name: given for name, given in scaling.items() if given is not None}
    kind = keys.get("rope_type", keys.get("type", "default"))
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"scaling has rope_type {kind!r}; known types are {', '.join(TYPES)}")
    required = TYPES[kind].required
    known = (*required, *TYPES[kind].optional, *COMMON_KEYS)
    unknown = [name for name in keys if name not in known]
    if unknown:
        raise ValueError(
            f"scaling of rope_type {kind!r} has unknown keys {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(dict.fromkeys(known))}"
        )
    missing = [name for name in required if name not in keys]
    if missing:
        raise ValueError(f"scaling of rope_type {kind!r} needs {', '.join(map(repr, missing))}; got {keys!r}")
    keys |= {name: checked_number(name, keys[name]) for name in keys if name in (*LOWEST, *POSITIVE)}
    return kind, keys


def checked_number(name: str, given: Any) -> float:
    """A number of the scaling dictionary, in its range."""
    number = as_number(f"scaling[{name!r}]", given)
    if name in POSITIVE and number <= 0.0:
        raise ValueError(f"scaling[{name!r}] must be above 0, got {number:g}")
    if number < LOWEST.get(name, number):
        raise ValueError(f"scaling[{name!r}] must be at least {LOWEST[name]:g}, got {number:g}")
    if name == "partial_rotary_factor" and number > 1.0:
        raise ValueError(f"scaling[{name!r}] must be at most 1, got {number:g}")
    return number


def rope_base(base: float, keys: Keys) -> float:
    """``base``, or the ``rope_theta`` of the dictionary; both only if they agree or base is the default."""
    base = as_number("base", base)
    theta = keys.get("rope_theta", base)
    if base not in (theta, DEFAULT_BASE):
        raise ValueError(f"base is {base:g}, but scaling['rope_theta'] is {theta:g}; leave one of them out")
    if theta <= 1.0:
        raise ValueError(f"base must be above 1, got {theta:g}")
    return float(theta)


def plain_frequencies(dim: int, base: float) -> Array:
    """f_i = base^(-2i/dim)."""
    frequencies: Array = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return frequencies


def original_length(keys: Keys, kind: str) -> float:
    """The length the model was first trained on."""
    length = keys.get("original_max_position_embeddings", keys.get("max_position_embeddings"))
    if length is None:
        raise ValueError(
            f"scaling of rope_type {kind!r} needs 'original_max_position_embeddings'; got {keys!r}"
        )
    return float(length)


def extension(keys: Keys, kind: str) -> float:
    """By how much the length was extended: ``factor``, or the ratio of the two lengths."""
    if "factor" in keys:
        return float(keys["factor"])
    if "max_position_embeddings" not in keys:
        raise ValueError(
            f"scaling of rope_type {kind!r} needs 'factor' or 'max_position_embeddings'; got {keys!r}"
        )
    return float(keys["max_position_embeddings"] / original_length(keys, kind))


def default(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i."""
    return plain_frequencies(dim, base), 1.0


def linear(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i / factor."""
    return plain_frequencies(dim, base) / keys["factor"], 1.0


def proportional(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i / factor for the first ``partial_rotary_factor`` of the pairs, 0 for the others."""
    frequencies = plain_frequencies(dim, base) / keys.get("factor", 1.0)
    frequencies[int(keys.get("partial_rotary_factor", 1.0) * (dim // 2)) :] = 0.0
    return frequencies, 1.0


def dynamic(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i for base * (factor * L / M - (factor - 1))^(dim / (dim - 2)), where L = max(length, M)."""
    limit, factor = keys["max_position_embeddings"], keys["factor"]
    stretch = factor * max(length, limit) / limit - (factor - 1.0)
    exponent = dim / (dim - 2) if dim > 2 else 0.0  # the one pair of dim 2 has frequency 1 for every base
    return plain_frequencies(dim, base * stretch**exponent), 1.0


def yarn(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i (1 - s_i) + f_i / factor s_i, s a ramp from 0 at i(beta_fast) to 1 at i(beta_slow).

    i(r) = dim ln(M / (2 pi r)) / (2 ln base) is the pair that turns r times in the original length M.
    """
    factor, original = extension(keys, "yarn"), original_length(keys, "yarn")
    fast, slow = keys.get("beta_fast") or 32.0, keys.get("beta_slow") or 1.0
    if fast < slow:
        raise ValueError(f"scaling['beta_fast'] must be at least 'beta_slow', got {fast:g} and {slow:g}")
    low, high = (
        dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)
    )
    if as_flag("scaling['truncate']", keys.get("truncate", True)):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    frequencies = plain_frequencies(dim, base)
    grown = 0.1 * math.log(max(factor, 1.0))
    attention_factor = grown + 1.0
    if keys.get("mscale") and keys.get("mscale_all_dim"):
        attention_factor = (keys["mscale"] * grown + 1.0) / (keys["mscale_all_dim"] * grown + 1.0)
    return frequencies * (1.0 - ramp) + frequencies / factor * ramp, keys.get(
        "attention_factor", attention_factor
    )


def longrope(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i / long_factor_i where the length in use exceeds the original one, else f_i / short_factor_i."""
    original = original_length(keys, "longrope")
    divisors = {name: pair_factors(name, keys[name], dim // 2) for name in ("short_factor", "long_factor")}
    frequencies = (
        plain_frequencies(dim, base) / divisors["long_factor" if length > original else "short_factor"]
    )
    if "attention_factor" in keys:
        return frequencies, keys["attention_factor"]
    factor = max(extension(keys, "longrope"), 1.0)
    return frequencies, math.sqrt(1.0 + math.log(factor) / math.log(original))


def pair_factors(name: str, given: Any, pairs: int) -> Array:
    """A list of one positive number for each pair of elements."""
    factors = np.asarray(given)
    if factors.dtype.kind not in "fiu":
        raise TypeError(f"scaling[{name!r}] must be a list of numbers, got {given!r}")
    if factors.shape != (pairs,) or not np.all(factors > 0):
        raise ValueError(f"scaling[{name!r}] must hold {pairs} positive numbers, dim // 2; got {given!r}")
    return factors.astype(np.float64)


def llama3(dim: int, base: float, keys: Keys, length: int) -> tuple[Array, float]:
    """f_i (b + (1 - b) / factor): b rises from 0 to 1 with the turns in the original length M, from
    low_freq_factor to high_freq_factor of them.
    """
    low, high = keys["low_freq_factor"], keys["high_freq_factor"]
    if low >= high:
        raise ValueError(
            f"scaling['low_freq_factor'] must be below 'high_freq_factor', got {low:g}, {high:g}"
        )
    frequencies = plain_frequencies(dim, base)
    turns = original_length(keys, "llama3") * frequencies / (2.0 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * blend + frequencies / keys["factor"] * (1.0 - blend), 1.0


YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


class ScalingType(NamedTuple):
    """A scaling type: its formula, the keys it needs and those it takes besides."""

    frequencies: Callable[[int, float, Keys, int], tuple[Array, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


TYPES = {
    "default": ScalingType(default),
    "mrope": ScalingType(default),
    "linear": ScalingType(linear, ("factor",)),
    "dynamic": ScalingType(dynamic, ("factor", "max_position_embeddings")),
    "yarn": ScalingType(yarn, (), ("factor", "attention_factor", *YARN_KEYS)),
    "longrope": ScalingType(longrope, ("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": ScalingType(llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "proportional": ScalingType(proportional, (), ("factor",)),
}

# The numbers of the dictionaries: the lowest that is allowed, and those that must be above 0.
LOWEST = {
    "factor": 1.0,
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 2.0),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 0.0),
}
POSITIVE = ("rope_theta", "partial_rotary_factor", "attention_factor", "low_freq_factor", "high_freq_factor")
