"""How a MultiHeadAttention is made and what it refuses: from weights, by chance, from torch's names."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from npattn import MultiHeadAttention
from support import DTYPES, assert_same_bits
from test_layer import EMBED, HEADS, KV_HEADS, OUTPUT, Arrays, layer_of, normal, parameters


def test_weights_are_copied_and_the_layer_is_immutable() -> None:
    arrays = parameters() | {"sinks": normal(HEADS)}
    layer = layer_of(arrays)
    x = normal(2, 5, EMBED)
    before = layer(x)
    for array in arrays.values():
        array[...] = np.nan
    assert_same_bits(layer(x), before)
    with pytest.raises(AttributeError, match="immutable"):
        layer.num_heads = 3
    with pytest.raises(AttributeError, match=r"cannot delete dtype.*immutable"):
        del layer.dtype
    assert layer.dtype == np.float64


def test_random() -> None:
    layer = MultiHeadAttention.random(64, 8, num_kv_heads=2, rng=7)
    assert (layer.head_dim, layer.num_kv_heads, layer.dtype) == (8, 2, np.float32)
    x = normal(3, 64, dtype=np.float32)
    assert_same_bits(
        layer(x), MultiHeadAttention.random(64, 8, num_kv_heads=2, rng=np.random.default_rng(7))(x)
    )
    assert (layer(x) != MultiHeadAttention.random(64, 8, num_kv_heads=2, rng=8)(x)).any()
    assert (MultiHeadAttention.random(64, 8, bias=False)(np.zeros((3, 64), np.float32)) == 0).all()
    assert (layer(np.zeros((3, 64), np.float32)) != 0).any()
    assert MultiHeadAttention.random(64, 8, dtype=np.float64, rope={}).dtype == np.float64
    with pytest.raises(ValueError, match=r"num_heads.*4.*10|embed_dim.*num_heads=4.*10"):
        MultiHeadAttention.random(10, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("a", 4), {}, TypeError, "embed_dim must be an integer, got 'a'"),
        ((16.0, 4), {}, TypeError, "embed_dim must be an integer, got 16.0"),
        ((0, 4), {}, ValueError, "embed_dim must be at least 1, got 0"),
        ((16, "4"), {}, TypeError, "num_heads must be an integer, got '4'"),
        ((16, 4), {"rng": "x"}, TypeError, "rng must be None, a seed .* got 'x'"),
        ((16, 4), {"rng": -1}, ValueError, "rng must be None, a seed .* got -1"),
        ((16, 4), {"bias": 1}, TypeError, "bias must be True or False, got 1"),
        ((16, 4), {"rope": 5}, TypeError, "rope must be a dict"),
    ],
)
def test_wrong_random(arguments: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MultiHeadAttention.random(*arguments, **options)


def torch_state(arrays: Arrays, *, fused: bool = True, prefix: str = "") -> Arrays:
    """The names and the orientation, (out, in), of torch.nn.MultiheadAttention."""
    weights = [arrays[f"w_{name}"].T for name in "qkv"]
    state = {"out_proj.weight": arrays["w_o"].T, "out_proj.bias": arrays["b_o"]}
    state["in_proj_bias"] = np.concatenate([arrays[f"b_{name}"] for name in "qkv"])
    if fused:
        state["in_proj_weight"] = np.concatenate(weights)
    else:
        state |= {f"{name}_proj_weight": weight for name, weight in zip("qkv", weights, strict=True)}
    return {prefix + name: array for name, array in state.items()}


class Tensor:
    """As much of a torch parameter as is asked of one. It is no array before `cpu`; of bfloat16 never."""

    def __init__(self, array: Any, *, kept_from_numpy: bool = True) -> None:
        self.array, self.kept_from_numpy = array, kept_from_numpy
        self.dtype = f"torch.{array.dtype}"

    def detach(self) -> Tensor:
        return Tensor(self.array)

    def cpu(self) -> Tensor:
        return Tensor(self.array, kept_from_numpy=False)

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32), kept_from_numpy=self.kept_from_numpy)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.kept_from_numpy or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert")
        return self.array


@pytest.mark.parametrize("fused", [True, False])
def test_from_torch(fused: bool) -> None:
    context_dim = 16 if fused else 12
    rng = np.random.default_rng(0)
    arrays = {f"w_{n}": rng.standard_normal((context_dim if n in "kv" else 16, 16)) for n in "qkvo"}
    arrays |= {f"b_{n}": rng.standard_normal(16) for n in "qkvo"}
    x, context = normal(2, 5, 16), normal(2, 6, context_dim)
    expected = MultiHeadAttention(**arrays, num_heads=4)(x, context)
    state = torch_state(arrays, fused=fused, prefix="layers.0.self_attn.") | {"norm.weight": np.ones(16)}
    layer = MultiHeadAttention.from_torch(state, 4, prefix="layers.0.self_attn.")
    assert_same_bits(layer(x, context), expected)
    tensors = {name: Tensor(array) for name, array in torch_state(arrays, fused=fused).items()}
    assert_same_bits(MultiHeadAttention.from_torch(tensors, 4)(x, context), expected)
    for name in ("in_proj_bias", "out_proj.bias"):
        del tensors[name]
    assert (MultiHeadAttention.from_torch(tensors, 4)(x * 0, context * 0) == 0).all()
    with pytest.raises(ValueError, match="prefix"):
        MultiHeadAttention.from_torch(state, 4)
    for name in ("bias_k", "bias_v"):
        with pytest.raises(ValueError, match=name):
            MultiHeadAttention.from_torch({**tensors, name: np.zeros((1, 1, 16))}, 4)
    with pytest.raises(ValueError, match="num_heads=5"):
        MultiHeadAttention.from_torch(tensors, 5)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_from_torch_in_half_precision(dtype: str, as_tensors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 arrays as safetensors reads them, tensors as torch has them; biases may be wider."""
    rng = np.random.default_rng(0)
    arrays = {f"w_{n}": rng.standard_normal((16, 16)).astype(DTYPES[dtype]) for n in "qkvo"}
    arrays |= {f"b_{n}": rng.standard_normal(16).astype(DTYPES[dtype]) for n in "qkv"}
    arrays["b_o"] = rng.standard_normal(16).astype(np.float32)
    x = normal(2, 5, 16, dtype=DTYPES[dtype])
    expected = MultiHeadAttention(**arrays, num_heads=4)(x)
    for fused in (True, False):
        state: dict[str, Any] = torch_state(arrays, fused=fused)
        if as_tensors:
            state = {name: Tensor(array) for name, array in state.items()}
        layer = MultiHeadAttention.from_torch(state, 4)
        assert layer.dtype == DTYPES[dtype]
        assert_same_bits(layer(x), expected)
    assert MultiHeadAttention.from_torch(state, 4).astype(np.int8)(x).dtype == DTYPES[dtype]
    if as_tensors and dtype == "bfloat16":
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(TypeError, match=r"'q_proj_weight'\] is bfloat16.*pip install ml_dtypes"):
            MultiHeadAttention.from_torch(state, 4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"in_proj_weight": np.zeros((47, 16))}, ValueError, r"in_proj_weight.*\(3 \* embed_dim.*\(47, 16\)"),
        ({"in_proj_weight": np.zeros((45, 16))}, ValueError, r"in_proj_weight.*\(45, 16\)"),
        ({"in_proj_weight": np.zeros(48)}, ValueError, r"in_proj_weight.*\(48,\)"),
        ({"in_proj_bias": np.zeros(47)}, ValueError, r"in_proj_bias.*\(47,\)"),
        ({"in_proj_weight": "x"}, TypeError, "in_proj_weight"),
    ],
)
def test_wrong_torch_weights(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arrays = {f"w_{n}": np.zeros((16, 16)) for n in "qkvo"} | {f"b_{n}": np.zeros(16) for n in "qkvo"}
    with pytest.raises(error, match=words):
        MultiHeadAttention.from_torch(torch_state(arrays) | change, 4)


def test_wrong_state_dict() -> None:
    with pytest.raises(TypeError, match="state_dict must be a mapping of names to arrays, got NoneType"):
        MultiHeadAttention.from_torch(None, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prefix must be a str, got 3"):
        MultiHeadAttention.from_torch({}, 4, prefix=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.empty((2, 5, EMBED)), ValueError),
        (np.empty((2, 5, OUTPUT), np.float32), TypeError),
        ([[1.0]], TypeError),
        (np.broadcast_to(np.zeros(OUTPUT), (2, 5, OUTPUT)), ValueError),
    ],
)
def test_wrong_out(out: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="out"):
        layer_of(parameters())(normal(2, 5, EMBED), out=out)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_heads": 0}, ValueError, "num_heads"),
        ({"num_heads": -6}, ValueError, "num_heads"),
        ({"num_heads": 6.0}, TypeError, "num_heads"),
        ({"num_heads": True}, TypeError, "num_heads"),
        ({"num_heads": 5}, ValueError, r"num_heads.*5"),
        ({"num_kv_heads": 4}, ValueError, r"num_heads.*6 and 4"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
        ({"w_q": np.zeros(48)}, ValueError, "w_q"),
        ({"w_q": np.zeros((48, 0))}, ValueError, "w_q"),
        ({"w_q": np.zeros((48, 48), complex)}, TypeError, "w_q"),
        ({"w_k": np.zeros((48, 17))}, ValueError, r"w_k.*16.*17"),
        ({"w_v": np.zeros((47, 20))}, ValueError, r"w_v.*48.*47"),
        ({"w_v": np.zeros((48, 21))}, ValueError, r"w_v.*num_kv_heads=2.*21"),
        ({"w_o": np.zeros((59, 36))}, ValueError, r"w_o.*60.*59"),
        ({"w_o": [["a"]]}, TypeError, "w_o"),
        ({"b_q": np.zeros(47)}, ValueError, r"b_q.*48.*47"),
        ({"b_v": np.zeros((1, 20))}, ValueError, "b_v"),
        ({"q_norm": np.ones(9)}, ValueError, "q_norm"),
        ({"k_norm": np.ones(48)}, ValueError, "k_norm"),
        ({"norm_eps": "x"}, TypeError, "norm_eps"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps must be above 0, got 0"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps must be above 0, got -1"),
        ({"norm_eps": np.nan}, ValueError, "norm_eps must be finite"),
        ({"b_q": [[1], [1, 2]]}, ValueError, "b_q cannot be made an array"),
        ({"w_k": None}, TypeError, "w_k must be an array, got None"),
        ({"rope": {"bse": 1.0}}, ValueError, r"rope.*base.*'bse'"),
        ({"rope": {"rotary_dim": 7}}, ValueError, "rotary_dim"),
        ({"rope": {"scaling": {"rope_type": "new"}}}, ValueError, "rope_type"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"sinks": np.zeros(5)}, ValueError, "sinks"),
        ({"alibi_slopes": np.zeros(5)}, ValueError, "alibi_slopes"),
        ({"window": (-1, 0)}, ValueError, "window"),
        ({"scale": "x"}, TypeError, "scale"),
    ],
)
def test_wrong_parameters(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"(?s){words}"):
        MultiHeadAttention(**({"num_heads": HEADS, "num_kv_heads": KV_HEADS} | parameters() | change))


@pytest.mark.parametrize(
    ("x", "options", "error", "words"),
    [
        (np.zeros(48), {}, ValueError, r"x.*length, 48"),
        (np.zeros((5, 47)), {}, ValueError, r"x.*48.*47"),
        (np.zeros((5, 48), complex), {}, TypeError, "x"),
        (np.zeros((5, 48)), {"context": np.zeros((5, 40))}, ValueError, "context"),
        (
            np.zeros((2, 5, 48)),
            {"context": np.zeros((3, 5, 48))},
            ValueError,
            r"x \(2, 5, 48\) and context \(3, 5",
        ),
        (None, {}, TypeError, "x must be an array, got None"),
        (np.zeros((5, 48)), {"positions": [[0], [1, 2]]}, ValueError, "positions cannot be made an array"),
        (np.zeros((5, 48)), {"cache": object()}, TypeError, "cache must be a KVCache, got object"),
        (np.zeros((5, 48)), {"counts": [3]}, ValueError, "counts need a cache"),
        (np.zeros((5, 48)), {"positions": 5}, TypeError, r"positions.*np\.arange"),
        (np.zeros((5, 48)), {"positions": np.arange(4)}, ValueError, r"positions.*5.*4"),
        (np.zeros((5, 48)), {"positions": np.zeros(5)}, TypeError, "positions"),
        (np.zeros((5, 48)), {"attn_mask": np.zeros((5, 5), int)}, TypeError, "attn_mask"),
        (np.zeros((5, 48)), {"is_causal": 1}, TypeError, "is_causal"),
        (np.zeros((2, 5, 48)), {"kv_lengths": [6, 1]}, ValueError, "kv_lengths"),
    ],
)
def test_wrong_calls(x: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        layer_of(parameters(), rope={})(x, **options)


def test_positions_without_rope_are_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        layer_of(parameters())(normal(5, EMBED), positions=np.arange(5))


def test_repr() -> None:
    text = repr(MultiHeadAttention.random(64, 4, num_kv_heads=2, rope={"base": 500.0}))
    assert "sinks=array(6,)" in repr(layer_of(parameters(), sinks=np.zeros(6)))
    for part in ("MultiHeadAttention(", "num_heads=4", "num_kv_heads=2", "head_dim=16", "500.0", "float32"):
        assert part in text
