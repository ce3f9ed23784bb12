"""rotary_embedding and apply_rope: pairings, partial widths, layouts, tables, memory, errors."""

from __future__ import annotations

from typing import Any

import npattn
import numpy as np
import pure_python
import pytest
from hypothesis import given
from hypothesis import strategies as st
from npattn import reference
from npattn._matmul import linear
from shapes import Array, broadcast, every_second, layouts_of, poisoned_border, reversed_axes, unaligned
from support import DTYPES, assert_same_bits, assert_within
from tolerances import tolerance

pytestmark = pytest.mark.usefixtures("isa")

WIDTHS = (2, 4, 6, 8, 14, 16, 18, 30, 32, 34, 64, 66, 96, 128, 130)


def normal(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def tables(length: int, width: int, dtype: Any = np.float64) -> tuple[Array, Array]:
    return npattn.rope_cos_sin(length, width, dtype=dtype)


def assert_turned(actual: Array, x: Array, cos: Array, sin: Array, **options: Any) -> None:
    assert actual.dtype == x.dtype
    expected = reference.rotary_embedding(x, cos, sin, **options)
    # The tables are rounded to the dtype computed in: two more units of two products.
    assert_within(
        actual, expected, tolerance(x.dtype, 2, 2 * float(np.abs(x.astype(np.float64)).max(initial=0.0)))
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_width(dtype: np.dtype[Any], interleaved: bool) -> None:
    for width in WIDTHS:
        x = normal((2, 3, 5, width + 3), dtype)
        cos, sin = tables(5, width)
        turned = npattn.rotary_embedding(x, cos, sin, interleaved=interleaved, rotary_dim=width)
        assert_turned(turned, x, cos, sin, interleaved=interleaved, rotary_dim=width)
        assert_same_bits(turned[..., width:], x[..., width:])
        whole = np.ascontiguousarray(x[..., :width])
        assert_same_bits(
            npattn.rotary_embedding(whole, cos, sin, interleaved=interleaved), turned[..., :width]
        )


@pytest.mark.parametrize("interleaved", [False, True])
def test_against_lists(interleaved: bool) -> None:
    x = normal((4, 10))
    turned = npattn.rotary_embedding(x, *tables(4, 10), interleaved=interleaved)
    lists = [pure_python.rope(row, i, interleaved=interleaved) for i, row in enumerate(x.tolist())]
    assert_within(turned, lists, 1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inverse(dtype: Any, interleaved: bool) -> None:
    x = normal((3, 7, 40), dtype)
    cos, sin = tables(7, 40)
    options = {"interleaved": interleaved}
    turned = npattn.rotary_embedding(x, cos, sin, **options)
    back = npattn.rotary_embedding(turned, cos, sin, inverse=True, **options)
    assert_within(back, x, 4 * tolerance(dtype, 2, 8.0))
    assert_turned(
        npattn.rotary_embedding(x, cos, sin, inverse=True, **options), x, cos, sin, inverse=True, **options
    )
    assert_same_bits(
        npattn.rotary_embedding(x, cos, -sin, **options),
        npattn.rotary_embedding(x, cos, sin, inverse=True, **options),
    )


@pytest.mark.parametrize(
    "shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 1, 3, 5, 8), (1, 1, 1, 8), (4, 6, 1, 8)]
)
def test_tables_broadcast_without_the_head_axis(shape: tuple[int, ...]) -> None:
    x = normal(shape)
    length = shape[-2]
    lead = shape[:-3]
    for table_lead in {(), lead, (1,) * len(lead), lead[1:]}:
        for table_length in {1, length}:
            angles = normal((*table_lead, table_length, 4), seed=1)
            cos, sin = np.cos(angles), np.sin(angles)
            turned = npattn.rotary_embedding(x, cos, sin)
            assert_turned(turned, x, cos, sin)
            if len(shape) > 2:
                swapped = npattn.rotary_embedding(x.swapaxes(-2, -3), cos, sin, layout="BSHD")
                assert_same_bits(swapped.swapaxes(-2, -3), turned)
    cos, sin = np.cos(angles), np.sin(normal((1, 4)))
    assert_turned(npattn.rotary_embedding(x, cos, sin), x, cos, sin)  # each broadcasts by itself
    assert_turned(
        npattn.rotary_embedding(x, 1.0 * cos[..., :1, :], [[0.5] * 4]), x, cos[..., :1, :], [[0.5] * 4]
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_layouts_give_the_same_bits(dtype: Any, interleaved: bool) -> None:
    x = normal((2, 3, 19, 38), dtype)
    angles = normal((2, 19, 16), seed=1)
    cos, sin = np.cos(angles), np.sin(angles)
    options = {"interleaved": interleaved, "rotary_dim": 32}
    expected = npattn.rotary_embedding(x, cos, sin, **options)
    for (_, view), (_, cosines), (_, sines) in zip(
        layouts_of(x), layouts_of(cos), layouts_of(sin), strict=True
    ):
        assert_same_bits(npattn.rotary_embedding(view, cos, sin, **options), expected)
        assert_same_bits(npattn.rotary_embedding(x, cosines, sines, **options), expected)
    repeated = broadcast(x, (1, 2))
    assert_same_bits(
        npattn.rotary_embedding(repeated, cos, sin, **options),
        npattn.rotary_embedding(repeated.copy(), cos, sin, **options),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_out(dtype: np.dtype[Any], interleaved: bool) -> None:
    x = normal((2, 3, 5, 22), dtype)
    cos, sin = tables(5, 20)
    options = {"interleaved": interleaved, "rotary_dim": 20}
    expected = npattn.rotary_embedding(x, cos, sin, **options)
    for place in (np.asfortranarray, every_second, poisoned_border, reversed_axes, unaligned):
        out = place(np.zeros_like(x))
        assert npattn.rotary_embedding(x, cos, sin, out=out, **options) is out
        assert_same_bits(out, expected)
    for layout in (np.ascontiguousarray, np.asfortranarray, every_second, unaligned):
        both = layout(x.copy())
        npattn.rotary_embedding(both, cos, sin, out=both, **options)
        assert_same_bits(both, expected)
    for overlapping in (lambda b: b[1:], lambda b: b[:-1], lambda b: b[::-1][1:]):
        buffer = np.empty((3, 3, 5, 22), dtype)
        buffer[1:] = x
        out = overlapping(buffer)
        npattn.rotary_embedding(buffer[1:], cos, sin, out=out, **options)
        assert_same_bits(out, expected)


def test_out_may_be_the_memory_of_a_table() -> None:
    x = normal((4, 8))
    memory = normal((4, 16), seed=1)
    cos, sin, out = memory[:, :4], memory[:, 4:8], memory[:, :8]
    expected = npattn.rotary_embedding(x, cos.copy(), sin.copy())
    assert_same_bits(npattn.rotary_embedding(x, cos, sin, out=out), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_many_blocks(interleaved: bool) -> None:
    x = normal((3, 4000, 65), np.float32)
    cos, sin = tables(4000, 64, np.float32)
    options: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": 64}
    few = slice(7, None, 97)
    expected = npattn.rotary_embedding(x[:, few], cos[few], sin[few], **options)
    for layout in (np.ascontiguousarray, every_second, unaligned):
        out = layout(np.zeros_like(x))
        npattn.rotary_embedding(layout(x), cos, sin, out=out, **options)
        assert_same_bits(out[:, few], expected)


def test_threads_and_batch_change_no_bit() -> None:
    x = normal((3, 5, 300, 64), np.float32)
    cos, sin = tables(300, 64)
    with npattn.threads(1):
        alone = npattn.rotary_embedding(x, cos, sin)
    with npattn.threads(3):
        assert_same_bits(npattn.rotary_embedding(x, cos, sin), alone)
    assert_same_bits(npattn.rotary_embedding(x[1:2, 3:4], cos, sin), alone[1:2, 3:4])
    assert_same_bits(npattn.rotary_embedding(x[..., 17:18, :], cos[17:18], sin[17:18]), alone[..., 17:18, :])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("weights", [*DTYPES.values(), np.dtype(np.int8)], ids=str)
def test_within_a_product(weights: np.dtype[Any], interleaved: bool) -> None:
    """The heads of a product turned as it is computed: the bits of a product whose heads are turned after."""
    dtype = np.dtype(np.float32) if weights == np.int8 else weights
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    shapes = (
        (1, 1, 64, 64, 1),
        (2, 5, 40, 40, 3),
        (2, 97, 96, 64, 2),
        (3, 50, 50, 16, 2),
        (1, 300, 128, 128, 4),
    )
    for batch, length, width, turned_width, heads in shapes:
        x = normal((batch, length, 33), dtype)
        packed = npattn.pack_matrix(normal((33, heads * width + 19)), dtype=weights)
        table = npattn.rope_cos_sin(np.arange(1, batch * length + 1), turned_width, dtype=compute)
        plain = linear(x, packed)
        for rows in (length, batch * length):
            cos, sin = (array[:rows] for array in table)
            rotation = (cos, sin, width, heads * width, interleaved)
            expected = plain.copy()
            npattn.rotary_embedding(
                plain[..., : heads * width].reshape(batch, length, heads, width),
                *(array.reshape(-1, length, turned_width // 2) for array in (cos, sin)),
                interleaved=interleaved,
                rotary_dim=turned_width,
                layout="BSHD",
                out=expected[..., : heads * width].reshape(batch, length, heads, width),
            )
            assert not np.array_equal(expected, plain)
            for same in (x, np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)):
                assert_same_bits(linear(same, packed, rotation=rotation), expected)


def test_dtypes() -> None:
    cos, sin = tables(3, 4)
    for dtype in DTYPES.values():
        x = normal((2, 3, 4), dtype)
        for table_dtype in (np.float32, np.float64):
            turned = npattn.rotary_embedding(x, cos.astype(table_dtype), sin.astype(table_dtype))
            assert turned.dtype == dtype
    integers = npattn.rotary_embedding([[1, 2, 3, 4]], [[1, 1]], [[0, 0]])
    assert_same_bits(integers, np.array([[1.0, 2, 3, 4]]))
    # The tables are rounded once: float64 ones give the bits of float32 ones.
    x = normal((2, 3, 4), np.float32)
    assert_same_bits(
        npattn.rotary_embedding(x, cos, sin), npattn.rotary_embedding(x, *tables(3, 4, np.float32))
    )


def test_empty() -> None:
    for shape in ((2, 0, 8), (0, 3, 4, 8), (0, 8)):
        x = np.zeros(shape, np.float32)
        cos, sin = tables(shape[-2], 8)
        assert npattn.rotary_embedding(x, cos, sin).shape == shape
    x = normal((2, 3, 8))
    none = np.zeros((3, 0))
    assert_same_bits(npattn.rotary_embedding(x, none, none, rotary_dim=0), x)
    assert npattn.rotary_embedding(np.zeros((2, 3, 0)), none, none).shape == (2, 3, 0)
    for turned in npattn.apply_rope(x, x, np.arange(3), rotary_dim=0):
        assert_same_bits(turned, x)
        assert not np.shares_memory(turned, x)


def test_errors() -> None:
    x = np.zeros((2, 3, 5, 8), np.float32)
    cos, sin = tables(5, 8)
    with pytest.raises(ValueError, match="x must have at least two axes"):
        npattn.rotary_embedding(np.zeros(8), cos[0], sin[0])
    with pytest.raises(ValueError, match='layout must be "BHSD" or "BSHD", got \'SBHD\''):
        npattn.rotary_embedding(x, cos, sin, layout="SBHD")
    for width in (7, 10, -2):
        with pytest.raises(ValueError, match=f"rotary_dim must be an even number from 0 to 8.*got {width}"):
            npattn.rotary_embedding(x, cos, sin, rotary_dim=width)
    with pytest.raises(TypeError, match=r"rotary_dim must be an integer, got 4\.0"):
        npattn.rotary_embedding(x, cos, sin, rotary_dim=4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cos has shape \(5, 4\); expected \(\.\.\., L, 2\)"):
        npattn.rotary_embedding(x, cos, sin, rotary_dim=4)
    with pytest.raises(ValueError, match=r"sin has shape \(5, 3\)"):
        npattn.rotary_embedding(x, cos, sin[:, :3])
    for table in (cos[:4], np.zeros((3, 5, 4)), np.zeros((2, 3, 5, 4))):
        with pytest.raises(ValueError, match=r"cos of shape .* does not broadcast to \(2, 5, 4\)"):
            npattn.rotary_embedding(x, table, sin)
    with pytest.raises(TypeError, match="interleaved must be True or False"):
        npattn.rotary_embedding(x, cos, sin, interleaved=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="complex"):
        npattn.rotary_embedding(x, cos + 1j * sin, sin)
    with pytest.raises(TypeError, match="out has dtype float64"):
        npattn.rotary_embedding(x, cos, sin, out=np.zeros(x.shape))
    with pytest.raises(ValueError, match="out has shape"):
        npattn.rotary_embedding(x, cos, sin, out=np.zeros((3, 5, 8), np.float32))


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float64"), ("bfloat16", "bfloat16")])
def test_apply_rope(dtypes: tuple[str, str], layout: str) -> None:
    query, key = normal((2, 6, 5, 16), DTYPES[dtypes[0]]), normal((2, 3, 5, 16), DTYPES[dtypes[1]])
    if layout == "BSHD":
        query, key = query.swapaxes(1, 2), key.swapaxes(1, 2)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for positions in (np.arange(5), np.array([[3, 1, 4, 1, 5], [-9, 2, 6, 5, 3]]), [7, 8, 9, 10, 11]):
        for options in ({}, {"interleaved": True}, {"rotary_dim": 10, "base": 500.0}, {"scaling": yarn}):
            turned = npattn.apply_rope(query, key, positions, layout=layout, **options)
            expected = reference.apply_rope(query, key, positions, layout=layout, **options)
            for given_array, ours, theirs in zip((query, key), turned, expected, strict=True):
                assert ours.dtype == given_array.dtype
                assert_within(ours, theirs, tolerance(ours.dtype, 2, 10.0))


def test_apply_rope_partial_factor_and_sections() -> None:
    query, key = normal((2, 4, 3, 16)), normal((2, 4, 3, 16), seed=1)
    partial = {"rope_type": "default", "partial_rotary_factor": 0.5}
    turned = npattn.apply_rope(query, key, np.arange(3), scaling=partial)
    for given_array, ours in zip((query, key), turned, strict=True):
        assert_same_bits(ours[..., 8:], given_array[..., 8:])
        assert_same_bits(
            ours[..., :8], npattn.rotary_embedding(np.ascontiguousarray(given_array[..., :8]), *tables(3, 8))
        )
    with pytest.raises(ValueError, match=r"rotary_dim is 4.*partial_rotary_factor"):
        npattn.apply_rope(query, key, np.arange(3), scaling=partial, rotary_dim=4)
    positions = np.arange(18).reshape(3, 2, 3)
    for places in (positions, positions[:, 0]):
        ours = npattn.apply_rope(query, key, places, sections=[4, 2, 2])
        theirs = reference.apply_rope(query, key, places, sections=[4, 2, 2])
        assert_within(ours[0], theirs[0], 1e-14)
        assert_within(ours[1], theirs[1], 1e-14)


def test_apply_rope_errors() -> None:
    x = np.zeros((2, 3, 5, 8))
    with pytest.raises(TypeError, match=r"positions.*np\.arange\(n\).*\[p\]"):
        npattn.apply_rope(x, x, 5)
    with pytest.raises(TypeError, match="positions must be integers"):
        npattn.apply_rope(x, x, np.arange(5.0))
    with pytest.raises(ValueError, match=r"query has 5 tokens and key 4.*call rotary_embedding twice"):
        npattn.apply_rope(x, x[:, :, :4], np.arange(5))
    with pytest.raises(ValueError, match="query has head_dim 8 and key 4"):
        npattn.apply_rope(x, x[..., :4], np.arange(5))
    for positions in (np.arange(4), np.zeros((3, 5), np.int64), np.zeros((2, 3, 5), np.int64)):
        with pytest.raises(
            ValueError, match=r"positions of shape .* do not fit the tokens of query.*\(5,\) or \(2, 5\)"
        ):
            npattn.apply_rope(x, x, positions)
    with pytest.raises(ValueError, match="rotary_dim"):
        npattn.apply_rope(x[..., :7], x[..., :7], np.arange(5))


@given(data=st.data())
def test_laws(data: st.DataObject) -> None:
    heads, length, pairs = (data.draw(st.integers(1, 9)) for _ in range(3))
    interleaved = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    a, b = normal((2, heads, length, 2 * pairs), dtype, seed=data.draw(st.integers(0, 99)))
    m, n = data.draw(st.integers(-100, 100)), data.draw(st.integers(-100, 100))

    def at(x: Array, position: int) -> Array:
        cos, sin = npattn.rope_cos_sin([position], 2 * pairs, dtype=np.float64)
        return npattn.rotary_embedding(x, cos, sin, interleaved=interleaved)

    bound = 40 * tolerance(
        dtype, 2 * pairs, float((np.abs(a) * np.abs(b)).sum(-1).max()) + float((a**2).sum(-1).max())
    )
    assert_within((at(a, m) ** 2).sum(-1), (a**2).sum(-1), bound)
    assert_within((at(a, m) * at(b, n)).sum(-1), (at(a, m + 50) * at(b, n + 50)).sum(-1), bound)
    assert_same_bits(at(a, 0), a + dtype(0))
