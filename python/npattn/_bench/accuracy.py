"""The table of errors: each path in each dtype on four kinds of inputs, beside plain NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plain
from .inputs import FLOAT32, computed_in, dtype_of, wider
from .peers import Peer
from .plain import Array
from .problem import Kind, PeerTask, errors
from .report import Table

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
Arrays = tuple[Array, ...]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8")
INPUTS: Mapping[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform in [0, 1)": lambda rng, shape: rng.random(shape),
    "heavy-tailed": lambda rng, shape: rng.standard_t(3, shape),
    "normal + 10": lambda rng, shape: rng.standard_normal(shape) + 10,
}


@dataclass(frozen=True)
class Path:
    """A way to compute, on arrays of these shapes: at least 10,000 outputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    npattn: Callable[[Arrays, bool], Array]  # True: int8, of float32 arrays
    numpy: Callable[..., Array]
    kind: Kind | None  # of a peer's task; None: nobody else has this path
    int8: bool = False


def _attention(arrays: Arrays, _: bool) -> Array:
    from .. import scaled_dot_product_attention

    return np.asarray(scaled_dot_product_attention(*arrays))


def _cached(arrays: Arrays, int8: bool) -> Array:
    from .. import KVCache

    query, key, value = arrays
    batch, heads, _, width = key.shape
    cache = KVCache(batch, heads, width, dtype=np.int8 if int8 else key.dtype)
    cache.append(key, value)
    return np.asarray(cache.attend(query))


def _matmul(arrays: Arrays, int8: bool) -> Array:
    import npattn

    a, b = arrays
    return np.asarray(npattn.matmul(a, npattn.pack_matrix(b, dtype=np.int8) if int8 else b))


def _softmax(arrays: Arrays, _: bool) -> Array:
    import npattn

    (x,) = arrays
    return npattn.softmax(x)


MANY_QUERIES = ((1, 3, 80, 64), (1, 3, 520, 64), (1, 3, 520, 64))
ONE_QUERY = ((1, 160, 1, 64), (1, 160, 400, 64), (1, 160, 400, 64))
PATHS = (
    Path("prefill", MANY_QUERIES, _attention, plain.attention, "attention"),
    Path("decode", ONE_QUERY, _attention, plain.attention, "attention"),
    Path("decode from a cache", ONE_QUERY, _cached, plain.attention, None, int8=True),
    Path("matmul, depth 1024", ((100, 1024), (1024, 128)), _matmul, np.matmul, "matmul", int8=True),
    Path("softmax of 512", ((32, 512),), _softmax, plain.softmax, "softmax"),
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
    int8 = name == "int8"
    if int8 and not path.int8:
        return {}
    held = FLOAT32 if int8 else dtype_of(name)
    rng = np.random.default_rng(0)
    arrays = tuple(draw(rng, shape).astype(held) for shape in path.shapes)
    exact = path.numpy(*(array.astype(wider(held)) for array in arrays))
    cells = {"npattn": _cell(path.npattn(arrays, int8), exact)}
    if int8 or path.kind is None:
        return cells
    computed = path.numpy(*(array.astype(computed_in(held), copy=False) for array in arrays))
    cells["NumPy"] = _cell(_round(computed, held), exact)
    if torch is not None:
        task = PeerTask(path.kind, arrays, {"causal": False, "visible": None})
        cells["torch"] = _cell(torch.result(task), exact)
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
        "exact result. int8: the cache, and the weights of the product, made of float32 numbers. NumPy",
        "computes half types in float32 and rounds the result; torch gets them as they are. What others",
        "make of decode they make of a cache.",
    ]
    return lines, remarks
