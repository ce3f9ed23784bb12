"""npattn beside plain NumPy on 1024 tokens: time in interleaved rounds, error of both against float64."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import npattn

from .._info import cpu_model
from .report import Lines, Section, Text

NUM_HEADS, LENGTH, HEAD_DIM = 8, 1024, 64
ROUNDS, SECONDS = 25, 1.5

Array = NDArray[np.floating]


def numpy_attention(query: Array, key: Array, value: Array) -> Array:
    """softmax(q k' / sqrt(E)) v as one writes it in NumPy, with as few passes as NumPy allows."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= scores.dtype.type(query.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    result: Array = scores @ value
    return result


def interleaved(first: Callable[[], object], second: Callable[[], object]) -> NDArray[np.float64]:
    """Seconds of both, (rounds, 2): they take turns, so that a noisy moment meets both alike."""
    first(), second()
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or (len(times) < ROUNDS and time.perf_counter() < end):
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        times.append((middle - start, time.perf_counter() - middle))
    return np.array(times)


def section() -> Section:
    """The table, the ratio with its spread, and the machine it was measured on."""
    rng = np.random.default_rng(2)
    shape = (NUM_HEADS, LENGTH, HEAD_DIM)
    query, key, value = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    exact = numpy_attention(*(array.astype(np.float64) for array in (query, key, value)))

    times = interleaved(
        lambda: npattn.scaled_dot_product_attention(query, key, value),
        lambda: numpy_attention(query, key, value),
    )
    results = {
        "npattn": npattn.scaled_dot_product_attention(query, key, value),
        "NumPy": numpy_attention(query, key, value),
    }
    operations = 4.0 * NUM_HEADS * LENGTH * LENGTH * HEAD_DIM
    rows = [["", "median", "quartiles", "rate", "max error", "rms error"]]
    for (name, result), seconds in zip(results.items(), times.T, strict=True):
        low, median, high = np.percentile(seconds, (25, 50, 75))
        error = result - exact
        rows.append(
            [
                name,
                f"{median * 1e3:.1f} ms",
                f"{low * 1e3:.1f} to {high * 1e3:.1f}",
                f"{operations / median / 1e9:.0f} GFLOP/s",
                f"{np.abs(error).max():.1e}",
                f"{np.sqrt(np.mean(error**2)):.1e}",
            ]
        )
    low, median, high = np.percentile(times[:, 1] / times[:, 0], (25, 50, 75))
    return Section(
        f"Against plain NumPy: {LENGTH} tokens, {NUM_HEADS} heads of {HEAD_DIM}, float32",
        (
            Lines(rows, header=True),
            Text(
                f"npattn is {median:.2g} times as fast (quartiles {low:.2g} to {high:.2g}, "
                f"{len(times)} interleaved rounds).\n"
                "Errors are against float64."
            ),
            Lines(_machine()),
        ),
    )


def _machine() -> list[list[str]]:
    rows = [
        ["CPU", cpu_model()],
        ["ISA", npattn.isa.active()],
        ["threads", f"{npattn.get_num_threads()} for npattn; NumPy's BLAS has its own"],
    ]
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("OPENBLAS_", "MKL_", "OMP_", "GOTO_", "VECLIB_", "BLIS_"))
    ]
    if settings:
        rows.append(["set here", ", ".join(settings)])
    load, cpus = _load(), os.cpu_count() or 1
    if load > cpus:
        rows.append(["busy", f"load {load:.1f} on {cpus} CPUs: other work distorts both times and the ratio"])
    return rows


def _load() -> float:
    """The average number of runnable threads in the last minute, 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
