"""Recorded faults of other systems: special values, long sums, axes, lse, empty shapes, ragged batches."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import npattn
import numpy as np
import pytest
from npattn import scaled_dot_product_attention as sdpa
from shapes import pattern
from support import DTYPES, assert_case, assert_close, assert_same_bits, filled_qkv
from tolerances import BFLOAT16

pytestmark = pytest.mark.usefixtures("isa")
INF, NAN = np.inf, np.nan
ORDINARY = [0.09003057317, 0.2447284711, 0.6652409558]

NUM_01 = {  # row: softmax, logsumexp
    (INF, 0): ([NAN, NAN], INF),
    (INF, INF, 0): ([NAN, NAN, NAN], INF),
    (-INF, 0): ([0, 1], 0),
    (-INF, -INF): ([0, 0], -INF),
    (NAN, 0, 1): ([NAN, NAN, NAN], NAN),
    (1e30, 1e30, -1e30): ([0.5, 0.5, 0], 1e30),
    (3.4e38, -3.4e38): ([1, 0], 3.4e38),
    (-1e30, -1e30): ([0.5, 0.5], -1e30),
    (1e5, 1e5): ([0.5, 0.5], 100000.69314718056),
    (-1e5, -1e5): ([0.5, 0.5], -99999.30685281944),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("row", NUM_01)
def test_NUM_01(row: tuple[float, ...], dtype: type) -> None:
    expected, total = NUM_01[row]
    x = np.array(row, dtype)
    assert_case(npattn.softmax(x), expected)
    np.testing.assert_allclose(npattn.logsumexp(x), dtype(total), rtol=1e-15 if dtype is np.float64 else 1e-7)
    if np.isfinite(total):
        below_top = x.astype(np.float64) - float(x.max())
        with np.errstate(over="ignore"):
            expected_log = (below_top - np.log(np.exp(below_top).sum())).astype(dtype)
        assert_case(npattn.log_softmax(x), expected_log)
    else:
        first = -INF if total == -INF else NAN
        assert_case(npattn.log_softmax(x)[0], dtype(first))
    for width in (3, 4, 8, 15, 16, 17, 33, 64, 70):  # every tail length, beside an ordinary row
        table = np.full((3, width), -INF, dtype)
        table[0, :3] = table[2, :3] = [1, 2, 3]
        table[1, : len(row)] = row
        for axis, block in ((-1, table), (0, np.ascontiguousarray(table.T))):
            soft = np.moveaxis(npattn.softmax(block, axis), axis, -1)
            for ordinary in (0, 2):
                assert_case(soft[ordinary, :3], ORDINARY)
                assert not soft[ordinary, 3:].any()
            assert_case(soft[1, : len(row)], expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_NUM_02(dtype: str) -> None:
    for n in [*range(1, 71), 1000]:
        x = (1000 - np.arange(n) / 2).astype(DTYPES[dtype])
        expected = np.exp(-np.arange(n) / 2) * (1 - np.exp(-0.5)) / (1 - np.exp(-n / 2))
        columns = np.stack([x, x], axis=1)
        for soft in (npattn.softmax(x), npattn.softmax(columns, axis=0)[:, 1]):
            assert_case(soft, expected)
            assert abs(float(soft.astype(np.float64).sum()) - 1) < {"float16": 2e-3}.get(dtype, 1e-6)
        if dtype != "float16":
            assert_case(npattn.softmax(x - x.dtype.type(2000)), expected)
    assert_case(npattn.logsumexp((1000 - np.arange(17) / 2).astype(np.float64)), 1000.93254864)
    assert npattn.softmax(np.full(2, 1e30)).tolist() == [0.5, 0.5]


def test_NUM_03() -> None:
    for length, dtype, exact in (
        (4096, np.float16, 2.0**-12),
        (512, BFLOAT16, 2.0**-9),
        (65536, np.float16, 2.0**-16),
    ):
        soft = npattn.softmax(np.zeros(length, dtype))
        assert soft.dtype == dtype
        assert (soft.astype(np.float64) == exact).all()
        assert soft.astype(np.float64).sum() == 1
    query, key = np.zeros((1, 3, 8), np.float16), np.ones((1, 4096, 8), np.float16)
    assert (sdpa(query, key, np.ones((1, 4096, 5), np.float16)) == 1).all()
    rng = np.random.default_rng(0)
    for length in (1000, 65536):
        x = (4 * rng.standard_normal((3, length))).astype(np.float16)
        exact = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
        exact /= exact.sum(-1, keepdims=True)
        soft = npattn.softmax(x)
        ulp = np.spacing(exact.astype(np.float16)).astype(np.float64)
        assert (np.abs(soft.astype(np.float64) - exact) <= ulp).all()


def test_NUM_05() -> None:
    x, y = 4 * pattern((32, 32), 37, 5), 4 * pattern((2, 3, 4, 5), 37, 5)
    for soft, row, expected in (
        (npattn.softmax(x, 0), 3, [0.0023018726, 0.20070531, 0.017746475, 0.073886614]),
        (npattn.softmax(x.T, -1), 3, [0.004578089, 0.0019084314, 0.00035302432, 0.073886614]),
        (npattn.softmax(x[:, :10], -1), 3, [0.0083419346, 0.33321741, 0.05272265, 0.084250555]),
        (npattn.softmax(x[::2, 1::3], -1), 5, [0.056135021, 0.000229411, 0.40202323, 0.018224373]),
    ):
        assert_case(soft[row, :4], expected)
    for axis, expected in enumerate([0.98549642, 0.65125627, 0.87052971, 0.23827108]):
        assert_case(npattn.softmax(y, axis)[1, 2, 3, 4], expected)
        assert_same_bits(npattn.softmax(y, axis - 4), npattn.softmax(y, axis))
    for ndim in range(1, 6):
        z = pattern((3, 1, 4, 2, 5)[:ndim], 29, 7)
        for axis in range(-ndim, ndim):
            exact = np.exp(z) / np.exp(z).sum(axis, keepdims=True)
            assert_close(npattn.softmax(z, axis), exact, 1e-14)
        for axis in (ndim, -ndim - 1):
            with pytest.raises(getattr(np, "exceptions", np).AxisError):
                npattn.softmax(z, axis)
    with pytest.raises(getattr(np, "exceptions", np).AxisError):
        npattn.softmax(np.float64(1.0))
    with pytest.raises(TypeError, match="axis"):
        npattn.softmax(y, (0, 1))


def test_NUM_06() -> None:
    query, key = np.full((1, 128), 256.0), np.full((2, 128), 256.0)
    key[1, 0] = 255.875
    value = np.array([[1.0], [0.0]])
    for dtype, tolerance in ((np.float16, 5e-3), (np.float64, 1e-10)):
        out, lse = sdpa(query.astype(dtype), key.astype(dtype), value.astype(dtype), return_lse=True)
        assert out.dtype == dtype
        assert abs(float(out[0, 0]) - 0.9441927808) < tolerance
        assert lse.dtype == (np.float32 if dtype is np.float16 else np.float64)
        assert abs(float(lse[0]) - 741455.2577) < 0.1


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_NUM_08(dtype: str) -> None:
    query = np.ones((1, 1, 1), DTYPES[dtype])
    key = np.log([[[1.0], [2.0], [3.0]]]).astype(DTYPES[dtype])
    value = np.eye(3, dtype=DTYPES[dtype])[None]
    out, lse = sdpa(query, key, value, scale=1, return_lse=True)
    assert lse.shape == (1, 1)
    assert_case(lse[0, 0], 1.791759469228055)
    assert_case(out[0, 0], [1 / 6, 1 / 3, 1 / 2])
    for options, expected in (
        ({"scale": 0.5}, 1.422207777041),
        ({"attn_mask": np.array([True, True, False])}, 1.098612288668110),
        ({"attn_mask": np.zeros(3, bool)}, -INF),
        ({"softcap": 2.0}, 1.734486202236),
        ({"sinks": np.log([4.0])}, 2.302585092994046),
    ):
        assert_case(sdpa(query, key, value, **{"scale": 1, **options}, return_lse=True)[1][0, 0], expected)
    for parts in (
        ((0, 1), (1, 3)),
        ((0, 3), (3, 3)),
        ((0, 0), (0, 2), (2, 3)),
        ((0, 1), (1, 2), (2, 3), (3, 3)),
    ):
        results = [sdpa(query, key[:, a:b], value[:, a:b], scale=1, return_lse=True) for a, b in parts]
        merged, merged_lse = npattn.merge_attention([r[0] for r in results], [r[1] for r in results])
        assert_case(merged, out, digits=1e-12)
        assert_case(merged_lse, lse, digits=1e-12)


def test_SIN_01() -> None:
    def encoding(position: int, dim: int) -> np.ndarray:
        return npattn.sinusoidal_encoding([position], dim, dtype=np.float64)[0]

    assert_case(encoding(2, 5), [0.909297427, -0.416146837, 0.0502165994, 0.998738351, 0.00126191435])
    six = [0.909297427, -0.416146837, 0.0926985008, 0.995694224, 0.00430885605, 0.999990717]
    assert_case(encoding(2, 6), six)
    assert_close(encoding(2, 1), [np.sin(2)], 1e-15)
    assert_close(encoding(2, 2), [np.sin(2), np.cos(2)], 1e-15)
    for dim in range(1, 17):
        assert encoding(0, dim).tolist() == [float(i % 2) for i in range(dim)]
        table = npattn.sinusoidal_encoding(50, dim, dtype=np.float64)
        angles = np.arange(50)[:, None] / 10000.0 ** (2 * (np.arange(dim) // 2) / dim)
        expected = np.where(np.arange(dim) % 2 == 0, np.sin(angles), np.cos(angles))
        assert_close(table, expected, 1e-12)
        pairs = table[:, : dim // 2 * 2].reshape(50, -1, 2)
        assert_close((pairs**2).sum(-1), np.ones(pairs.shape[:2]), 1e-12)
        halves = npattn.sinusoidal_encoding(50, dim, style="concatenated", dtype=np.float64)
        assert_close(halves, np.concatenate([table[:, ::2], table[:, 1::2]], axis=1), 1e-12)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("causal", [False, True])
def test_VAR_01(causal: bool, index_dtype: type) -> None:
    cu_q, cu_k = np.array([0, 0, 1, 1, 3, 5], index_dtype), np.array([0, 3, 5, 5, 9, 9], index_dtype)
    offsets = np.diff(cu_k) - np.diff(cu_q)
    query, key, value = filled_qkv((5, 2, 4), (9, 2, 4), (9, 2, 4))
    options = {"is_causal": True, "query_offset": offsets} if causal else {}
    out, lse = npattn.varlen_attention(query, key, value, cu_q, cu_k, **options, return_lse=True)
    assert_case(out[0, 0], [-0.646355455, -0.444129453, 0.00755695409, 0.467595456])
    assert_case(out[0, 1], [-0.78536818, -0.0569221401, 0.90083768, -0.0738412801])
    token_1 = {
        False: [-0.112003514, 0.336153824, 0.310505553, -0.00274869282],
        True: [-0.0957134185, 0.11269422, 0.0161961353, -0.11575583],
    }
    assert_case(out[1, 0], token_1[causal])
    assert_case(out[2, 0], [-0.279545927, 0.0301872454, 0.215156087, -0.0165582835])
    assert not out[3:].any()
    assert lse.shape == (2, 5)
    assert (lse[:, 3:] == -INF).all()
    for sequence, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        one = options and {"is_causal": True, "query_offset": int(offsets[sequence])}
        rows, keys, values = (
            a[s].swapaxes(0, 1)
            for a, s in zip((query, key, value), (slice(q0, q1), slice(k0, k1), slice(k0, k1)), strict=True)
        )
        assert_close(out[q0:q1].swapaxes(0, 1), sdpa(rows, keys, values, **one), 1e-14)
        poisoned_key, poisoned_value = np.full_like(key, NAN), np.full_like(value, NAN)
        poisoned_key[k0:k1], poisoned_value[k0:k1] = key[k0:k1], value[k0:k1]
        again = npattn.varlen_attention(query, poisoned_key, poisoned_value, cu_q, cu_k, **options)
        assert_same_bits(again[q0:q1], out[q0:q1])
    nothing = np.zeros(6, index_dtype)
    assert npattn.varlen_attention(query[:0], key[:0], value[:0], nothing, nothing).shape == (0, 2, 4)


EMPTIES = """
import sys
import numpy as np
import npattn
from npattn import scaled_dot_product_attention as sdpa

npattn.isa.use(sys.argv[1])
npattn.set_num_threads(int(sys.argv[2]))
z = lambda *shape: np.ones(shape, np.float32)

def check(result, shape, fill=0.0):
    assert result.shape == shape, (result.shape, shape)
    assert (result == fill).all()

out, weights, lse = sdpa(z(2, 3, 4, 8), z(2, 3, 0, 8), z(2, 3, 0, 5), return_weights=True, return_lse=True)
check(out, (2, 3, 4, 5))
check(weights, (2, 3, 4, 0))
check(lse, (2, 3, 4), -np.inf)
kept = np.full((2, 3, 4, 5), 7, np.float32)
assert sdpa(z(2, 3, 4, 8), z(2, 3, 0, 8), z(2, 3, 0, 5), out=kept) is kept
check(kept, (2, 3, 4, 5))
check(sdpa(z(2, 3, 0, 8), z(2, 3, 6, 8), z(2, 3, 6, 8)), (2, 3, 0, 8))
check(sdpa(z(0, 3, 4, 8), z(0, 3, 6, 8), z(0, 3, 6, 8)), (0, 3, 4, 8))
check(sdpa(z(2, 0, 4, 8), z(2, 0, 6, 8), z(2, 0, 6, 8)), (2, 0, 4, 8))
check(sdpa(z(2, 3, 4, 8), z(2, 3, 6, 8), z(2, 3, 6, 0)), (2, 3, 4, 0))
check(sdpa(z(2, 6, 4, 8), z(2, 3, 0, 8), z(2, 3, 0, 5), is_causal=True, query_offset=0), (2, 6, 4, 5))
check(sdpa(z(2, 6, 4, 8), z(2, 3, 0, 8), z(2, 3, 0, 5), np.ones((4, 0), bool)), (2, 6, 4, 5))
check(sdpa(z(2, 6, 4, 8), z(2, 3, 0, 8), z(2, 3, 0, 5), np.zeros((4, 0), np.float32)), (2, 6, 4, 5))
check(sdpa(z(2, 6, 4, 8), z(2, 3, 6, 8), z(2, 3, 6, 5), kv_lengths=0), (2, 6, 4, 5))
try:
    sdpa(z(2, 3, 4, 0), z(2, 3, 6, 0), z(2, 3, 6, 5))
    raise SystemExit("E = 0 was accepted")
except ValueError:
    pass
check(npattn.softmax(z(10, 0), 1), (10, 0))
check(npattn.softmax(z(10, 0), 0), (10, 0))
check(npattn.softmax(z(0, 5), 1), (0, 5))
check(npattn.log_softmax(z(10, 0), 1), (10, 0))
check(npattn.logsumexp(z(10, 0), 1), (10,), -np.inf)
check(npattn.logsumexp(z(10, 0), 0), (0,))
check(npattn.logsumexp(z(0, 5), 1), (0,))
check(npattn.apply_rope(z(2, 0, 8), z(2, 0, 8), np.arange(0))[0], (2, 0, 8))
check(npattn.split_heads(z(0, 3, 8), 2, copy=True), (0, 2, 3, 4))
check(npattn.split_heads(z(2, 0, 8), 2, copy=True), (2, 2, 0, 4))
check(npattn.merge_heads(z(2, 2, 0, 4)), (2, 0, 8))
check(npattn.matmul(z(3, 0), z(0, 4)), (3, 4))
check(npattn.matmul(z(0, 3), z(3, 4)), (0, 4))
print("all empty")
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_EMP_01(isa: str, threads: int) -> None:
    command = [sys.executable, "-W", "error", "-c", EMPTIES, isa, str(threads)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all empty\n"
