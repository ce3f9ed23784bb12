"""The options of attention as functions on a call, to be combined at will; and the paths a call may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from shapes import pattern
from support import Tolerances, random_qkv, tolerances_of
from tolerances import BFLOAT16, largest

Call = dict[str, Any]  # the keyword arguments of one call, the arrays among them

# name: (query length, key length, heads, kv heads, head dim, value dim)
PATHS = {
    "prefill": (26, 280, 4, 4, 24, 24),
    "square": (67, 67, 4, 2, 16, 16),
    "decode": (1, 600, 4, 4, 24, 24),
    "few_rows": (5, 40, 4, 4, 17, 9),
    "tiny": (3, 4, 4, 4, 8, 8),
}


def base_call(path: str) -> Call:
    query_len, key_len, heads, kv_heads, head_dim, value_dim = PATHS[path]
    query, key, value = random_qkv((2,), (heads, kv_heads), (query_len, key_len), (head_dim, value_dim))
    return {"query": query, "key": key, "value": value}


def lengths(call: Call) -> tuple[int, int]:
    return call["query"].shape[-2], call["key"].shape[-2]


def bool_mask(call: Call) -> None:
    call["attn_mask"] = pattern((4, *lengths(call)), 29, 7) > -0.4
    call["attn_mask"][1, -1] = False


def key_mask(call: Call) -> None:
    call["attn_mask"] = pattern((2, 1, 1, lengths(call)[1]), 31, 5) > -0.4


def float_mask(call: Call) -> None:
    mask = pattern((2, 1, *lengths(call)), 29, 7, np.float32)
    call["attn_mask"] = np.where(mask > 0.8, -np.inf, mask).astype(np.float32)


def bias(call: Call) -> None:
    call["bias"] = 3 * pattern((4, *lengths(call)), 41, 3, np.float32)


def causal(call: Call) -> None:
    call["is_causal"] = True


def window(call: Call) -> None:
    call["window"] = (max(1, lengths(call)[1] // 3), 2)


def window_left(call: Call) -> None:
    call["window"] = (2, None)


def offset_per_batch(call: Call) -> None:
    query_len, key_len = lengths(call)
    call["query_offset"] = np.array([key_len - query_len, -1])


def kv_lengths(call: Call) -> None:
    call["kv_lengths"] = np.array([lengths(call)[1] // 2, lengths(call)[1] - 1])


def scale(call: Call) -> None:
    call["scale"] = -0.3


def softcap(call: Call) -> None:
    call["softcap"] = 1.5


def sinks(call: Call) -> None:
    call["sinks"] = np.array([0.5, -np.inf, 3.0, -1.0])


def alibi(call: Call) -> None:
    call["alibi_slopes"] = np.array([0.5, 0.1, 0.02, 0.0])


def alibi_per_batch(call: Call) -> None:
    call["alibi_slopes"] = np.array([[0.5, 0.1, 0.02, 0.0], [0.3, 0.2, 0.1, 0.01]])


def heads_last(call: Call) -> None:
    call["layout"] = "BSHD"


def grouped(call: Call) -> None:
    call["key"], call["value"] = call["key"][:, :1], call["value"][:, :1]


def one_key_batch(call: Call) -> None:
    call["key"], call["value"] = call["key"][0], call["value"][:1]


def strided(call: Call) -> None:
    for name in ("query", "key", "value"):
        call[name] = np.repeat(call[name], 2, axis=-1)[..., ::2]


def cast(*dtypes: Any) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        for name, dtype in zip(("query", "key", "value"), dtypes, strict=True):
            call[name] = call[name].astype(dtype)

    return apply


# option: (the argument it occupies, what it does to the call); two options of one argument exclude each other
OPTIONS: dict[str, tuple[str, Callable[[Call], None]]] = {
    "grouped": ("heads", grouped),
    "one_key_batch": ("batch", one_key_batch),
    "float64": ("dtype", cast(*[np.float64] * 3)),
    "float16": ("dtype", cast(*[np.float16] * 3)),
    "bfloat16": ("dtype", cast(*[BFLOAT16] * 3)),
    "half_keys": ("dtype", cast(np.float32, np.float16, np.float16)),
    "strided": ("strides", strided),
    "bool_mask": ("attn_mask", bool_mask),
    "key_mask": ("attn_mask", key_mask),
    "float_mask": ("attn_mask", float_mask),
    "bias": ("bias", bias),
    "causal": ("is_causal", causal),
    "window": ("window", window),
    "window_left": ("window", window_left),
    "offset_per_batch": ("query_offset", offset_per_batch),
    "kv_lengths": ("kv_lengths", kv_lengths),
    "scale": ("scale", scale),
    "softcap": ("softcap", softcap),
    "sinks": ("sinks", sinks),
    "alibi": ("alibi_slopes", alibi),
    "alibi_per_batch": ("alibi_slopes", alibi_per_batch),
    "heads_last": ("layout", heads_last),
}


def call_with(path: str, names: tuple[str, ...]) -> Call:
    """The arguments of a call with these options, applied in the order of OPTIONS."""
    call = base_call(path)
    for name in names:
        OPTIONS[name][1](call)
    query_len, key_len = lengths(call)
    if {"is_causal", "window", "alibi_slopes"} & set(call) and query_len != key_len:
        call.setdefault("query_offset", key_len - query_len)
    if call.get("layout") == "BSHD":
        for name in ("query", "key", "value"):
            call[name] = call[name].swapaxes(-2, -3)
    return call


def call_tolerances(call: Call) -> Tolerances:
    """What the reference and a result of this call may differ by."""
    added = [call[name] for name in ("attn_mask", "bias") if name in call and call[name].dtype != bool]
    distance = (
        sum(lengths(call)) if "layout" not in call else sum(call[n].shape[-3] for n in ("query", "key"))
    )
    added_most = sum(largest(array) for array in added) + largest(call.get("alibi_slopes", 0.0)) * distance
    arrays = (call["query"], call["key"], call.get("value"))
    return tolerances_of(
        *arrays, scale=call.get("scale"), added=added_most, layout=call.get("layout", "BHSD")
    )
