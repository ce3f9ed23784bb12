"""Every wrong argument of attention is an error that names it, says what came and what is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from tolerances import BFLOAT16


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


QUERY, KEY, VALUE = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6)
OUT = (2, 4, 5, 6)
RAGGED: Any = [[1], [1, 2]]
LSE = VALUE[..., 0]
Row = tuple[Any, list[str], Callable[[], Any]]  # error, patterns in its message, the call


def attend(query: Any = QUERY, key: Any = KEY, value: Any = VALUE, mask: Any = None, **options: Any) -> Any:
    return sdpa(query, key, value, mask, **options)


ERRORS: dict[str, Row] = {
    # shapes of the arrays
    "1-D query": (ValueError, ["query", r"\(8,\)"], lambda: attend(query=zeros(8))),
    "0-D key": (ValueError, ["key", r"\(\)"], lambda: attend(key=np.float32(1))),
    "head_dim": (ValueError, ["key", "9"], lambda: attend(key=zeros(2, 2, 7, 9))),
    "key_len": (ValueError, ["value", "6", "7"], lambda: attend(value=zeros(2, 2, 6, 6))),
    "kv heads": (ValueError, ["value"], lambda: attend(value=zeros(2, 4, 7, 6))),
    "heads": (ValueError, ["3", "2"], lambda: attend(query=zeros(2, 3, 5, 8))),
    "leading axes": (ValueError, ["3", "2"], lambda: attend(query=zeros(3, 4, 5, 8))),
    "E = 0": (ValueError, ["0"], lambda: attend(query=zeros(2, 4, 5, 0), key=zeros(2, 2, 7, 0))),
    "layout": (ValueError, ["layout", "BSHD"], lambda: attend(layout="SBHD")),
    "layout type": ((TypeError, ValueError), ["layout"], lambda: attend(layout=3)),
    # dtypes
    "complex": (TypeError, ["query", "complex"], lambda: attend(query=QUERY.astype(complex))),
    "object": (TypeError, ["key", "object"], lambda: attend(key=KEY.astype(object))),
    "str": (TypeError, ["value", "<U|str"], lambda: attend(value=VALUE.astype(str))),
    "longdouble": (TypeError, ["query", "longdouble|float128"], lambda: attend(QUERY.astype(np.longdouble))),
    "halves": (TypeError, ["float16", "bfloat16"], lambda: attend(QUERY.astype("f2"), KEY.astype(BFLOAT16))),
    "masked": (TypeError, ["key", "masked"], lambda: attend(key=np.ma.masked_array(KEY))),
    "matrix": (TypeError, ["query", "matrix"], lambda: attend(query=np.asmatrix(QUERY[0, 0]))),
    "datetime": (TypeError, ["query", "datetime"], lambda: attend(QUERY.astype("M8[s]"))),
    "no query": (TypeError, ["query must be an array, got None"], lambda: attend(query=None)),
    "ragged key": (ValueError, ["key cannot", "list"], lambda: attend(key=RAGGED)),
    "ragged value": (ValueError, ["value cannot"], lambda: attend(value=RAGGED)),
    # masks
    "ragged mask": (ValueError, ["attn_mask cannot"], lambda: attend(mask=RAGGED)),
    "ragged bias": (ValueError, ["bias cannot"], lambda: attend(bias=RAGGED)),
    "integer mask": (TypeError, ["attn_mask", "int64", "bool"], lambda: attend(mask=zeros(5, 7, dtype="i8"))),
    "list mask": (TypeError, [r"np.asarray\(attn_mask, bool\)"], lambda: attend(mask=[[0, 1] * 3 + [1]] * 5)),
    "list bias": (TypeError, [r"np.asarray\(bias, np.float32\)"], lambda: attend(bias=[[1] * 7] * 5)),
    "bool bias": (TypeError, ["bias", "bool", "attn_mask"], lambda: attend(bias=zeros(5, 7, dtype=bool))),
    "integer bias": (TypeError, ["bias", "int32"], lambda: attend(bias=zeros(5, 7, dtype=np.int32))),
    "mask shape": (ValueError, ["attn_mask", r"\(5, 6\)", "7"], lambda: attend(mask=zeros(5, 6, dtype=bool))),
    "bias shape": (ValueError, ["bias", r"\(4, 7\)"], lambda: attend(bias=zeros(4, 7))),
    "(batch, Lk)": (
        ValueError,
        ["attn_mask", r"\(2, 7\)", r"\[:, None, None, :\]"],
        lambda: attend(mask=zeros(2, 7, dtype=bool)),
    ),
    "mask rank": (ValueError, ["attn_mask"], lambda: attend(mask=zeros(1, 2, 4, 5, 7, dtype=bool))),
    "complex mask": (TypeError, ["attn_mask", "complex"], lambda: attend(mask=zeros(5, 7, dtype=complex))),
    # positions
    "causal offset": (ValueError, ["query_offset", "0", "2"], lambda: attend(is_causal=True)),
    "window offset": (ValueError, ["query_offset", "0", "2"], lambda: attend(window=(1, 1))),
    "alibi offset": (ValueError, ["query_offset", "0", "2"], lambda: attend(alibi_slopes=np.ones(4))),
    "float offset": (TypeError, ["query_offset", "2.5|float"], lambda: attend(query_offset=2.5)),
    "bool offset": (TypeError, ["query_offset"], lambda: attend(query_offset=True)),
    "offset shape": (ValueError, ["query_offset", "3"], lambda: attend(query_offset=[1, 2, 3])),
    "is_causal": (TypeError, ["is_causal", "1"], lambda: attend(is_causal=1, query_offset=0)),
    "window length": ((TypeError, ValueError), ["window"], lambda: attend(window=(1,))),
    "window int": ((TypeError, ValueError), ["window", "3"], lambda: attend(window=3, query_offset=0)),
    "window float": (TypeError, ["window", "1.5"], lambda: attend(window=(1.5, 0), query_offset=0)),
    "negative window": (ValueError, ["window", "-1"], lambda: attend(window=(-1, 0), query_offset=0)),
    "ragged offset": (ValueError, ["query_offset cannot"], lambda: attend(query_offset=RAGGED)),
    "ragged lengths": (ValueError, ["kv_lengths cannot"], lambda: attend(kv_lengths=RAGGED)),
    "huge lengths": (ValueError, ["kv_lengths", r"got 2\*\*60 or more"], lambda: attend(kv_lengths=10**30)),
    "long lengths": (ValueError, ["kv_lengths", "8", "7"], lambda: attend(kv_lengths=8)),
    "negative lengths": (ValueError, ["kv_lengths", "-1"], lambda: attend(kv_lengths=[3, -1])),
    "float lengths": (TypeError, ["kv_lengths", "float"], lambda: attend(kv_lengths=np.array([3.0, 4.0]))),
    "lengths shape": (ValueError, ["kv_lengths", "3"], lambda: attend(kv_lengths=[1, 2, 3])),
    # numbers
    "scale": (TypeError, ["scale", "half"], lambda: attend(scale="half")),
    "nan scale": (ValueError, ["scale", "nan"], lambda: attend(scale=np.nan)),
    "softcap": (ValueError, ["softcap", "-2"], lambda: attend(softcap=-2.0)),
    "nan softcap": (ValueError, ["softcap", "nan"], lambda: attend(softcap=np.nan)),
    "sinks shape": (ValueError, ["sinks", r"\(2,\)", "4"], lambda: attend(sinks=np.zeros(2))),
    "sinks rank": (ValueError, ["sinks"], lambda: attend(sinks=np.zeros((2, 4)))),
    "ragged sinks": (ValueError, ["sinks cannot"], lambda: attend(sinks=RAGGED)),
    "ragged slopes": (ValueError, ["alibi_slopes cannot"], lambda: attend(alibi_slopes=RAGGED)),
    "complex sinks": (TypeError, ["sinks", "complex"], lambda: attend(sinks=np.zeros(4, complex))),
    "slopes shape": (ValueError, ["alibi_slopes", r"\(3,\)", "4"], lambda: attend(alibi_slopes=zeros(3))),
    "slopes dtype": (TypeError, ["alibi_slopes"], lambda: attend(alibi_slopes=["a"] * 4)),
    # out
    "out type": (TypeError, ["out", "list"], lambda: attend(out=[])),
    "out shape": (ValueError, ["out", r"4, 5, 8\)", r"4, 5, 6\)"], lambda: attend(out=zeros(2, 4, 5, 8))),
    "out dtype": (TypeError, ["out", "float64", "float32"], lambda: attend(out=zeros(*OUT, dtype="f8"))),
    "out locked": (ValueError, ["out", "read-only"], lambda: attend(out=np.broadcast_to(np.float32(0), OUT))),
    "out layout": (ValueError, ["out"], lambda: attend(out=zeros(2, 5, 4, 6))),
    # the other functions
    "merge count": (ValueError, ["lses|outputs"], lambda: npattn.merge_attention([VALUE] * 2, [LSE])),
    "merge empty": (ValueError, ["outputs"], lambda: npattn.merge_attention([], [])),
    "merge shapes": (
        ValueError,
        ["outputs|lses"],
        lambda: npattn.merge_attention([VALUE, VALUE[..., :5]], [LSE] * 2),
    ),
    "merge ragged": (ValueError, [r"outputs\[0\] cannot"], lambda: npattn.merge_attention([RAGGED], [LSE])),
    "merge lse": (ValueError, ["lses"], lambda: npattn.merge_attention([VALUE], [VALUE])),
}  # fmt: skip


def check(error: Any, words: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert re.search(word, message), f"{word!r} is not in {message!r}"
    assert "incompatible function arguments" not in message
    assert "std::" not in message
    assert "\n\n" not in message
    assert len(message) < 500


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", ERRORS)
def test_message(name: str) -> None:
    check(*ERRORS[name])


BLOCKS: dict[str, Callable[[Any], Any]] = {
    "x": npattn.softmax,
    "x of log_softmax": npattn.log_softmax,
    "x of logsumexp": npattn.logsumexp,
    "x of split_heads": lambda x: npattn.split_heads(x, 2),
    "x of merge_heads": npattn.merge_heads,
    "x of rotary_embedding": lambda x: npattn.rotary_embedding(x, zeros(1, 1), zeros(1, 1)),
    "cos": lambda cos: npattn.rotary_embedding(zeros(1, 2), cos, zeros(1, 1)),
    "a": lambda a: npattn.matmul(a, zeros(1, 1)),
    "b": lambda b: npattn.matmul(zeros(1, 1), b),
    "b of pack_matrix": npattn.pack_matrix,
    "positions": lambda positions: npattn.rope_cos_sin(positions, 4),
    "positions of sinusoidal_encoding": lambda positions: npattn.sinusoidal_encoding(positions, 4),
    "query of varlen": lambda query: varlen(query=query),
    "cu_seqlens_q": lambda starts: varlen(starts),
    "weights of explain": lambda weights: npattn.inspect.explain(weights, ["a"]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_no_array_is_named(name: str) -> None:
    argument = name.split()[0]
    check(TypeError, [f"^{argument} must be an array, got None"], lambda: BLOCKS[name](None))
    check(ValueError, [f"^{argument} cannot be made an array"], lambda: BLOCKS[name](RAGGED))


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        ("nope", "'nope'$"),
        (np.int32, "int32$"),
        ([1], r"\[1\]$"),
        (None, "None$"),
        (">f2", ">f2, in the other byte order: pass float16$"),
        (np.dtype(np.float32).newbyteorder("S"), "[<>]f4, in the other byte order: pass float32$"),
    ],
    ids=str,
)
def test_dtype_is_named(dtype: Any, named: str) -> None:
    for call in (
        lambda: npattn.matmul(zeros(1, 1), zeros(1, 1), dtype=dtype),
        lambda: npattn.pack_matrix(zeros(1, 1), dtype=dtype),
        lambda: npattn.rope_cos_sin(3, 4, dtype=dtype),
        lambda: npattn.sinusoidal_encoding(3, 4, dtype=dtype),
        lambda: npattn.MultiHeadAttention.random(16, 4, dtype=dtype),
        lambda: npattn.MultiHeadAttention.random(16, 4).astype(dtype),
        lambda: npattn.KVCache(1, 1, 4, dtype=dtype),
        lambda: npattn.PagedKVCache(1, 32, 1, 4, dtype=dtype),
    )[2 if dtype is None else 0 :]:  # the first two have it as their default
        check(TypeError, [f"dtype must be float32.*got {named}"], call)


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**64)])
def test_integers_beyond_int64_are_named(number: int) -> None:
    x = zeros(3, 1, 4)
    numbers = np.array([0, number], np.uint64 if number == 2**63 else object)
    for name, call in {
        "positions": lambda: npattn.rope_cos_sin(numbers, 4),
        "cu_seqlens_q": lambda: npattn.varlen_attention(x, x, x, numbers),
    }.items():
        check(ValueError, [rf"{name} must be below 2\*\*63, got {number}$"], call)
    small = np.array([0, 1], object)
    check(TypeError, ["positions must be integers, got dtype object"], lambda: npattn.rope_cos_sin(small, 4))


def test_bfloat16_by_name_needs_ml_dtypes() -> None:
    code = 'import npattn; npattn.KVCache(1, 1, 4, dtype="bfloat16")'
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "int8, got 'bfloat16', which NumPy knows after import ml_dtypes" in run.stderr


def test_offsets_of_any_size_are_integers() -> None:
    """Past all keys is past all keys, in one number or a list of them."""
    for huge in (10**30, 2**63, 2**64):
        for offset, sign in ((huge, 1), (-huge, -1), ([huge, -huge], 0)):
            expected = {1: (2**60, 2**60), -1: (-(2**60), -(2**60)), 0: (2**60, -(2**60))}[sign]
            options: dict[str, Any] = {"is_causal": True, "kv_lengths": [7, 7]}
            found = attend(query_offset=offset, **options)
            np.testing.assert_array_equal(found, attend(query_offset=np.array(expected), **options))
    check(TypeError, ["query_offset", "float"], lambda: attend(query_offset=[1, 2.5]))
    check(TypeError, ["query_offset"], lambda: attend(query_offset=[10**30, True]))


def varlen(cu_q: Any = (0, 3, 5), cu_k: Any = None, **options: Any) -> Any:
    packed = zeros(5, 2, 8)
    return npattn.varlen_attention(options.pop("query", packed), packed, packed, cu_q, cu_k, **options)


VARLEN_ERRORS: dict[str, Row] = {
    "start": (ValueError, ["cu_seqlens_q", "1"], lambda: varlen([1, 3, 5])),
    "end": (ValueError, ["cu_seqlens_q", "4", "5"], lambda: varlen([0, 3, 4])),
    "decreasing": (ValueError, ["cu_seqlens_q"], lambda: varlen([0, 4, 3, 5])),
    "float": (TypeError, ["cu_seqlens_q", "float"], lambda: varlen(np.array([0.0, 5.0]))),
    "rank": (ValueError, ["cu_seqlens_q"], lambda: varlen([[0, 5]])),
    "empty": (ValueError, ["cu_seqlens_q"], lambda: varlen(np.zeros(0, np.int64))),
    "counts": (ValueError, ["cu_seqlens_k"], lambda: varlen([0, 3, 5], [0, 5])),
    "key end": (ValueError, ["cu_seqlens_k"], lambda: varlen([0, 3, 5], [0, 5, 6])),
    "query rank": (ValueError, ["query"], lambda: varlen(query=zeros(1, 5, 2, 8))),
    "heads": (ValueError, ["3", "2"], lambda: varlen(query=zeros(5, 3, 8))),
    "out": (ValueError, ["out"], lambda: varlen(out=zeros(5, 2, 7))),
    "offset": (ValueError, ["query_offset"], lambda: varlen([0, 3, 5], [0, 1, 5], is_causal=True)),
    "offset shape": (ValueError, ["query_offset"], lambda: varlen(is_causal=True, query_offset=[0, 0, 0])),
}


@pytest.mark.parametrize("name", VARLEN_ERRORS)
def test_varlen_message(name: str) -> None:
    check(*VARLEN_ERRORS[name])


@pytest.mark.parametrize("name", ["attention_weights", "attention_scores", "attention_summary"])
def test_the_same_errors_everywhere(name: str) -> None:
    """What takes the same options refuses the same ones."""
    function = getattr(npattn, name)
    for options, error, words in (
        ({"is_causal": True}, ValueError, ["query_offset"]),
        ({"kv_lengths": 8}, ValueError, ["kv_lengths", "8"]),
        ({"softcap": -1.0}, ValueError, ["softcap"]),
        ({"sinks": np.zeros(3)}, ValueError, ["sinks"]),
        ({"attn_mask": zeros(5, 7, dtype=np.int32)}, TypeError, ["attn_mask", "int32"]),
        ({"bias": zeros(5, 7, dtype=bool)}, TypeError, ["bias"]),
        ({"layout": "HSBD"}, ValueError, ["layout"]),
    ):
        check(error, words, lambda options=options: function(QUERY, KEY, **options))
    check(ValueError, ["key"], lambda: function(QUERY, zeros(2, 2, 7, 9)))
    with pytest.raises(TypeError):
        function(QUERY, KEY, out=QUERY)


def test_nothing_is_written_before_an_error() -> None:
    out = np.full(OUT, 7, np.float32)
    for options in ({"softcap": -1.0}, {"kv_lengths": 99}, {"is_causal": True}, {"sinks": np.zeros(9)}):
        with pytest.raises(ValueError):
            attend(out=out, **options)
        assert (out == 7).all()


def test_only_the_mask_may_be_positional() -> None:
    with pytest.raises(TypeError, match="positional"):
        sdpa(QUERY, KEY, VALUE, None, None)
    with pytest.raises(TypeError, match="dropout_p"):
        sdpa(QUERY, KEY, VALUE, dropout_p=0.1)


def test_unknown_isa() -> None:
    with pytest.raises(ValueError, match=r"(?s)avx1024.*generic"):
        npattn.isa.use("avx1024")
    assert npattn.isa.active() in npattn.isa.available()
