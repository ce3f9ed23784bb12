"""Recorded faults of other systems: rotary embedding, its pairings, tables, widths, scalings, positions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import npattn
import numpy as np
import pytest
from shapes import pattern
from support import DTYPES, assert_case, assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("isa")


def rope(x: np.ndarray, positions: Any, *, rotary_dim: int | None = None, **options: Any) -> np.ndarray:
    """x (..., L, D) rotated at integer positions (..., L)."""
    table = {name: options.pop(name) for name in ("base", "scaling", "length") if name in options}
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    cos, sin = npattn.rope_cos_sin(np.asarray(positions), width, **table, dtype=np.float64)
    return npattn.rotary_embedding(x, cos, sin, rotary_dim=rotary_dim, **options)


def test_ROPE_01() -> None:
    x, x8 = np.array([[1.0, 2, 3, 4]]), pattern((1, 8), 37, 5)
    assert_case(rope(x, [1], interleaved=True)[0], [-1.14263966, 1.9220756, 2.95985067, 4.0297995])
    assert_case(rope(x, [1])[0], [-1.98411065, 1.95990067, 2.4623779, 4.01979967])
    pairs = [-0.304917848, -1.05328898, 0.344705148, 0.0758361059]
    pairs += [-0.105514789, 0.61130458, -0.0844588441, -0.21153389]
    halves = [-0.653941978, -0.851728153, 0.317745401, -0.16258193]
    halves += [-0.652778412, 0.0895467857, -0.0638698993, -0.21208076]
    assert_case(rope(x8, [7], interleaved=True)[0], pairs)
    assert_case(rope(x8, [7])[0], halves)
    order = np.arange(8).reshape(2, 4).T.reshape(-1)  # halves -> interleaved pairs
    assert_close(rope(x8, [7])[:, order], rope(x8[:, order], [7], interleaved=True), 1e-15)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 1, 8))
    for interleaved in (False, True):
        assert_same_bits(rope(x, [0], interleaved=interleaved), x)
        assert_close(np.linalg.norm(rope(a, [123], interleaved=interleaved)), np.linalg.norm(a), 1e-14)
        m, n = 17, 5
        near = rope(a, [m], interleaved=interleaved) @ rope(b, [n], interleaved=interleaved).T
        far = rope(a, [m + 1000], interleaved=interleaved) @ rope(b, [n + 1000], interleaved=interleaved).T
        assert_close(far, near, 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ROPE_02(dtype: str) -> None:
    x = np.ones((1, 32), DTYPES[dtype])
    halves = [-0.636258561, -0.645115743, -1.2111373, 0.621711642, -1.26300239, 1.25850136, 1.27022621]
    assert_case(rope(x, [1857])[0, [0, 1, 2, 15, 16, 17, 31]], halves)
    pairs = [-0.636258561, -1.26300239, -0.645115743, 1.25850136, 0.621711642, 1.27022621]
    assert_case(rope(x, [1857], interleaved=True)[0, [0, 1, 2, 3, 30, 31]], pairs)
    cos, sin = npattn.rope_cos_sin([1857], 32, dtype=np.float64)
    assert_case(cos[0, 1], 0.3066928098)
    assert_case(sin[0, 1], 0.9518085524)
    for position in (256, 257, 2048, 2049, 10**6):
        exact = rope(np.ones((1, 32)), [position])
        error = np.abs(rope(x, [position]).astype(np.float64) - exact)
        ulp = np.abs(np.spacing(exact.astype(DTYPES[dtype]))).astype(np.float64)
        assert (error <= np.maximum(ulp, 2e-7 if dtype != "float64" else 1e-15)).all()
    assert not np.array_equal(rope(x, [2048]), rope(x, [2049]))
    assert not np.array_equal(rope(x, [256]), rope(x, [257]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_ROPE_04(interleaved: bool) -> None:
    row = np.arange(1, 9) / 8
    answers = {
        False: [
            0.634785445,
            -0.140173513,
            0.330799575,
            0.494993771,
            0.0574233316,
            0.778043306,
            0.892648666,
            1.00248749,
        ],
        True: [
            0.275188842,
            -0.048949988,
            0.0893806914,
            0.618575858,
            0.586734536,
            0.780299676,
            0.869989083,
            1.00436248,
        ],
    }
    for shape in ((3, 2, 1, 8), (1, 2, 1, 8), (6, 1, 8), (1, 8)):
        x = np.broadcast_to(row, shape)
        out = rope(x, [5], interleaved=interleaved)
        assert_case(out, np.broadcast_to(answers[interleaved], shape))
        assert (out == out.reshape(-1, 8)[0]).all()
    x = np.broadcast_to(row, (3, 1, 2, 8))
    assert_case(
        rope(x, [5], interleaved=interleaved, layout="BSHD"), np.broadcast_to(answers[interleaved], x.shape)
    )
    x = pattern((3, 2, 9, 8), 37, 5)
    whole = rope(x, np.arange(9), interleaved=interleaved)
    for t in (0, 5, 8):
        assert_same_bits(rope(x[:, :, t : t + 1], [t], interleaved=interleaved), whole[:, :, t : t + 1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ROPE_05(dtype: str) -> None:
    x = np.arange(1.0, 9)[None].astype(DTYPES[dtype])
    out = rope(x, [3], rotary_dim=4)
    assert_case(out[0], [-1.41335252, 1.87911807, -2.82885748, 4.05819114, 5, 6, 7, 8])
    out = rope(x, [3], rotary_dim=4, interleaved=True)
    assert_case(out[0], [-1.27223251, -1.83886499, 2.8786681, 4.08818664, 5, 6, 7, 8])
    for interleaved in (False, True):
        for width in (2, 4, 6, 8):
            out = rope(x, [3], rotary_dim=width, interleaved=interleaved)
            assert_same_bits(out[:, :width], rope(x[:, :width], [3], interleaved=interleaved))
            assert_same_bits(out[:, width:], x[:, width:])
    cos, sin = npattn.rope_cos_sin([3], 4)
    for width in (3, 10, -2):
        with pytest.raises(ValueError, match="rotary_dim"):
            npattn.rotary_embedding(x, cos, sin, rotary_dim=width)
        with pytest.raises(ValueError, match="rotary_dim"):
            npattn.apply_rope(x, x, np.array([3]), rotary_dim=width)
    for tables in ((cos, sin[:, :1]), (cos[:, :1], sin), (cos[:, :1], sin[:, :1])):
        with pytest.raises(ValueError, match=r"cos|sin"):
            npattn.rotary_embedding(x, *tables, rotary_dim=4)


def yarn(factor: float, original: int = 4096, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


def test_ROPE_06() -> None:
    factors = {4: 1.138629436, 16: 1.277258872, 32: 1.34657359, 64: 1.415888308, 128: 1.485203026}
    for factor, attention in factors.items():
        assert_case(npattn.rope_frequencies(64, scaling=yarn(factor))[1], attention)
    assert npattn.rope_frequencies(64, scaling=yarn(64, attention_factor=1.0))[1] == 1.0
    assert npattn.rope_frequencies(64, scaling=yarn(1))[1] == 1.0
    inv_freq, _ = npattn.rope_frequencies(64, scaling=yarn(4, beta_fast=32, beta_slow=1))
    wanted = [
        1.0,
        0.0749894209,
        0.0562341325,
        0.0397367859,
        0.00653846154,
        0.0013378867,
        0.000547162895,
        0.00025,
    ]
    np.testing.assert_allclose(
        inv_freq[[0, 9, 10, 11, 16, 20, 22, 24, 31]], [*wanted, 3.33380358e-05], rtol=3e-9
    )
    inv_freq, _ = npattn.rope_frequencies(16, scaling=yarn(8, 128))
    wanted = [
        1.0,
        0.223994668,
        0.0416666667,
        0.00395284708,
        0.00125,
        0.000395284708,
        0.000125,
        3.95284708e-05,
    ]
    np.testing.assert_allclose(inv_freq, wanted, rtol=3e-9)
    x = pattern((3, 64), 37, 5)
    rotated = rope(x, np.arange(3), scaling=yarn(128))
    assert_close(np.linalg.norm(rotated, axis=-1), 1.485203026 * np.linalg.norm(x, axis=-1), 1e-8)
    with pytest.raises(ValueError, match="factor"):
        npattn.rope_frequencies(64, scaling=yarn(0.5))
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        npattn.rope_frequencies(64, scaling={"rope_type": "yarn", "factor": 4})


def llama3(factor: float, **more: Any) -> dict[str, Any]:
    known = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {**known, "original_max_position_embeddings": 8192, **more}


def test_ROPE_07() -> None:
    plain, _ = npattn.rope_frequencies(64, base=500000.0)
    inv_freq, attention = npattn.rope_frequencies(64, base=500000.0, scaling=llama3(32))
    assert attention == 1.0
    assert_same_bits(inv_freq[:15], plain[:15])
    np.testing.assert_allclose(inv_freq[18:], plain[18:] / 32, rtol=1e-15)
    blended = [0.00321144599, 0.00129054793, 0.000429556797, 9.7082878e-05, 1.94616382e-05]
    np.testing.assert_allclose(inv_freq[14:19], blended, rtol=3e-9)
    np.testing.assert_allclose(inv_freq[31], 9.418306725e-08, rtol=1e-9)
    inv_freq, _ = npattn.rope_frequencies(128, base=500000.0, scaling=llama3(8))
    blended = [0.00216657076, 0.00137189357, 0.000856751413, 0.000524846161, 0.00031269375, 0.000178507813]
    np.testing.assert_allclose(inv_freq[29:35], blended, rtol=3e-9)
    np.testing.assert_allclose(inv_freq[[35, 63]], [9.556212354e-05, 3.068925989e-07], rtol=1e-9)
    with pytest.raises(ValueError, match=r"high_freq_factor|low_freq_factor"):
        npattn.rope_frequencies(64, scaling=llama3(8, low_freq_factor=4.0))
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        incomplete = {name: value for name, value in llama3(8).items() if name != key}
        with pytest.raises(ValueError, match=key):
            npattn.rope_frequencies(64, scaling=incomplete)
    with pytest.raises(ValueError, match=r"(?s)llama4.*yarn"):
        npattn.rope_frequencies(64, scaling=llama3(8, rope_type="llama4"))


def test_ROPE_09() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.02],
        "long_factor": [1.05, 64.8],
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
    }
    short, short_attention = npattn.rope_frequencies(4, scaling=scaling, length=4096)
    long, long_attention = npattn.rope_frequencies(4, scaling=scaling, length=4097)
    np.testing.assert_allclose(short, [1, 0.00980392156863], rtol=1e-12)
    np.testing.assert_allclose(long, [0.952380952381, 0.000154320987654], rtol=1e-11)
    assert_case(short_attention, 1.19023807142)
    assert_case(long_attention, 1.19023807142)
    assert npattn.rope_frequencies(4, scaling={**scaling, "attention_factor": 2.0}, length=4097)[1] == 2.0
    for name in ("short_factor", "long_factor"):
        with pytest.raises(ValueError, match=name):
            npattn.rope_frequencies(4, scaling={**scaling, name: [1.0, 1.0, 1.0]}, length=5000)


def test_ROPE_11() -> None:
    x = np.ones((2, 1, 3, 4))
    answers = {
        0: [1, 1, 1, 1],
        4: [0.103158874, 0.959210772, -1.41044612, 1.03918944],
        260: [-1.41343386, -1.37239013, -0.0469544533, -0.341387382],
        261: [-0.724170764, -1.36890769, -1.21473318, -0.355093985],
        265: [-0.445963503, -1.35361274, 1.34205684, -0.409551655],
        40000: [-0.623952183, 0.325623021, 1.26912713, -1.3762157],
    }
    positions = np.array([[0, 0, 1], [4, 260, 265]])
    out = rope(x, positions)
    for item, token in np.ndindex(2, 3):
        if positions[item, token] in answers:
            assert_case(out[item, 0, token], answers[int(positions[item, token])])
    small = np.array([250, 251, 255], np.uint8)
    assert_case(
        rope(x[0], small.astype(np.int64) + 10)[0, [0, 1, 2]], [answers[260], answers[261], answers[265]]
    )
    for dtype in (np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64):
        assert_same_bits(rope(x, small.astype(dtype)), rope(x, small.astype(np.int64)))
    for dtype in (np.uint16, np.int32, np.int64):
        assert_case(rope(x[:, :, :1], np.array([40000], dtype))[0, 0, 0], answers[40000])
    assert_same_bits(rope(x, positions[:1]), rope(x, positions[0]))
    for call in (
        lambda: npattn.rope_cos_sin(np.array([40000.0]), 4),
        lambda: npattn.apply_rope(x, x, positions.astype(np.float64)),
    ):
        with pytest.raises(TypeError, match="positions"):
            call()
    with pytest.raises(ValueError, match="positions"):
        npattn.apply_rope(x, x, np.zeros((3, 3), np.int64))


def test_ROPE_12() -> None:
    x = np.ones((1, 1, 3, 4))
    first = rope(x, np.arange(3), base=10000.0)
    assert_case(first[0, 0, 1], [-0.301168679, 0.989950167, 1.38177329, 1.00994983])
    assert_case(rope(x, np.arange(5, 8))[0, 0, 0], [1.24258646, 0.948771091, -0.675262089, 1.04872943])
    other_base = rope(x, np.arange(3), base=500000.0)
    assert_case(other_base[0, 0, 1], [-0.301168679, 0.998584787, 1.38177329, 1.00141321])

    def call(i: int) -> np.ndarray:
        dtype = (np.float64, np.float32)[i % 2]
        options: dict[str, Any] = [
            {"base": 500000.0},
            {"interleaved": True},
            {"rotary_dim": 2},
            {"scaling": yarn(4)},
            {},
        ][i % 5]
        return rope(x.astype(dtype), np.arange(i % 3, i % 3 + 3), **options)

    alone = [call(i) for i in range(30)]
    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(call, range(30))):
            assert_same_bits(result, alone[i])
    assert_same_bits(rope(x, np.arange(3), base=10000.0), first)
