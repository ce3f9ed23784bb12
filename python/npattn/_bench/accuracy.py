"""The table of errors: each path in each dtype on four kinds of inputs, beside plain NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plain
from .inputs import FLOAT32, FLOAT64, computed_in, dtype_of, wider
from .peers import Peer
from .plain import Array
from .problem import Kind, PeerTask, errors
from .report import Table

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
Arrays = tuple[Array, ...]

FLOATS = ("float32", "float64", "float16", "bfloat16")
HALVES = FLOATS[2:]
DTYPES = (*FLOATS, "int8")
INPUTS: Mapping[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform in [0, 1)": lambda rng, shape: rng.random(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape),
    "normal + 10": lambda rng, shape: rng.standard_normal(shape) + 10,
}


@dataclass(frozen=True)
class Path:
    """A way to compute, on arrays of these shapes: at least 10,000 outputs.

    `single`: so many of the arrays, the first, are float32 whatever the dtype. `weights`: so many, the last,
    are normal whatever the inputs, of the variance 1 / rows.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    npattn: Callable[[Arrays, bool], Array]  # True: int8, of float32 arrays
    numpy: Callable[..., Array]
    kind: Kind | None = None  # of a peer's task; None: nobody else has this path
    dtypes: tuple[str, ...] = FLOATS
    single: int = 0
    weights: int = 0
    numpy_too: bool = True  # False: NumPy has another path for it

    def arrays(self, draw: Draw, dtype: np.dtype[Any]) -> Arrays:
        """The same arrays for every dtype, rounded to it."""
        rng = np.random.default_rng(0)
        drawn = len(self.shapes) - self.weights
        wide = [draw(rng, shape) for shape in self.shapes[:drawn]]
        wide += [rng.standard_normal(shape) * shape[0] ** -0.5 for shape in self.shapes[drawn:]]
        return tuple(x.astype(FLOAT32 if i < self.single else dtype) for i, x in enumerate(wide))


def _attention(arrays: Arrays, _: bool) -> Array:
    from .. import scaled_dot_product_attention

    return np.asarray(scaled_dot_product_attention(*arrays))


def _cached(arrays: Arrays, int8: bool) -> Array:
    from .. import KVCache

    query, key, value = arrays
    batch, heads, _, width = key.shape
    cache = KVCache(batch, heads, width, dtype=np.int8 if int8 else key.dtype)
    cache.append(key, value)
    return np.asarray(cache.attend(query, is_causal=False))


def _matmul(arrays: Arrays, int8: bool) -> Array:
    import npattn

    a, b = arrays
    return np.asarray(npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8) if int8 else b))


def _softmax(arrays: Arrays, _: bool) -> Array:
    import npattn

    (x,) = arrays
    return npattn.softmax(x)


def _log_softmax(arrays: Arrays, _: bool) -> Array:
    import npattn

    (x,) = arrays
    return npattn.log_softmax(x)


def _angles(x: Array) -> Arrays:
    """cos and sin for x (..., L, D): float32, for wide numbers float64."""
    from .. import rope_cos_sin

    return rope_cos_sin(x.shape[-2], x.shape[-1], dtype=FLOAT64 if x.itemsize > 4 else FLOAT32)


def _rope(arrays: Arrays, _: bool) -> Array:
    import npattn

    (x,) = arrays
    return npattn.rotary_embedding(x, *_angles(x))


def _plain_rope(x: Array) -> Array:
    return plain.rotate_halves(x, *_angles(x))


def _layer(arrays: Arrays, int8: bool) -> Array:
    from .. import MultiHeadAttention

    x, *weights = arrays
    layer = MultiHeadAttention(*weights, num_heads=LAYER_HEADS)
    return np.asarray((layer.astype(np.int8) if int8 else layer)(x))


def _plain_layer(x: Array, *weights: Array) -> Array:
    return plain.layer(x, weights, [np.zeros((), x.dtype)] * 4, LAYER_HEADS)


LAYER_HEADS = 4
MANY_QUERIES = ((1, 3, 80, 64), (1, 3, 520, 64), (1, 3, 520, 64))
GROUPED_QUERIES = ((1, 6, 80, 64), *MANY_QUERIES[1:])  # 160 rows that share a key head
ONE_QUERY = ((1, 160, 1, 64), (1, 160, 400, 64), (1, 160, 400, 64))
LAYER = ((160, 64), *[(64, 64)] * 4)
PATHS = (
    Path("prefill", MANY_QUERIES, _attention, plain.attention, "attention"),
    Path("prefill, float32 query", MANY_QUERIES, _attention, plain.attention, dtypes=HALVES, single=1),
    Path("decode", ONE_QUERY, _attention, plain.attention, "attention"),
    Path("decode from a cache", ONE_QUERY, _cached, plain.attention, dtypes=DTYPES, numpy_too=False),
    Path("160 rows from a cache", GROUPED_QUERIES, _cached, plain.attention, dtypes=DTYPES, numpy_too=False),
    Path("layer, 160 x 64", LAYER, _layer, _plain_layer, "layer", DTYPES, weights=4),
    Path("matmul, depth 1024", ((100, 1024), (1024, 128)), _matmul, np.matmul, "matmul", DTYPES),
    Path("softmax of 512", ((32, 512),), _softmax, plain.softmax, "softmax"),
    Path("log_softmax of 512", ((32, 512),), _log_softmax, plain.log_softmax, "log_softmax"),
    Path("rotary embedding", ((1, 4, 80, 64),), _rope, _plain_rope),
)


def _cell(result: Array, exact: Array) -> str:
    """RMS and largest error, as shares of the RMS of the exact result."""
    finite = np.isfinite(result.astype(exact.dtype))
    if not finite.all():
        return "overflows" if np.isfinite(exact).all() else "not finite"
    largest, rms = errors(result, exact)
    size = float(np.sqrt(np.mean(exact**2)))
    return f"{rms / size:.1e} ({largest / size:.1e})"


def _round(array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def _cells(path: Path, draw: Draw, name: str, torch: Peer | None) -> dict[str, str]:
    """The errors of everybody that computes this path in the dtype of that name."""
    if name not in path.dtypes:
        return {}
    int8 = name == "int8"
    held = FLOAT32 if int8 else dtype_of(name)
    arrays = path.arrays(draw, held)
    exact = path.numpy(*(array.astype(wider(held)) for array in arrays))
    result = path.npattn(arrays, int8)
    cells = {"npattn": _cell(result, exact)}
    if int8 or not path.numpy_too:
        return cells
    computed = path.numpy(*(array.astype(computed_in(held), copy=False) for array in arrays))
    cells["NumPy"] = _cell(_round(computed, result.dtype), exact)
    if torch is not None and path.kind is not None:
        options = {"causal": False, "visible": None, "heads": LAYER_HEADS}
        cells["torch"] = _cell(torch.result(PeerTask(path.kind, arrays, options)), exact)
    return cells


def table(chosen: str, torch: Peer | None) -> tuple[Table, list[str]]:
    """The table of the paths with `chosen` in their names, and remarks about what it leaves out."""
    names, remarks = [], []
    for name in DTYPES:
        try:
            dtype_of(name)
        except ImportError as missing:
            remarks.append(f"{name} is left out: {missing.name} is not installed.")
        else:
            names.append(name)
    lines: Table = [["path", "inputs", "by", *names]]
    for path in PATHS:
        if chosen.lower() not in path.name:
            continue
        for inputs, draw in INPUTS.items():
            columns = [_cells(path, draw, name, torch) for name in names]
            first = path.name if draw is INPUTS["normal"] else ""
            for who in ("npattn", "NumPy", "torch"):
                if any(who in cells for cells in columns):
                    head = [first, inputs] if who == "npattn" else ["", ""]
                    lines.append([*head, who, *(cells.get(who, "-") for cells in columns)])
    remarks += [
        "RMS (largest) error against a wider dtype on the same stored numbers, as a share of the RMS of the",
        "exact result. int8: the cache, and the weights of products, made of float32 numbers. NumPy",
        "computes half types in float32 and rounds the result; torch gets them as they are. What others",
        "make of decode they make of a cache.",
    ]
    return lines, remarks
