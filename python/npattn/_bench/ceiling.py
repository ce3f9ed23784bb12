"""What this machine can do at most, measured with the active instruction set right beside a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .problem import Problem

FMA_SECONDS = 0.005
READ_SECONDS = 0.01  # and at least three passes
ASSUMED_BANDWIDTH = 30e9  # bytes a second; only decides how many passes are made


def measurement(problem: Problem, threads: int) -> Callable[[], float]:
    """A function that measures the ceiling of `problem` once: operations a second in its dtype, or bytes a
    second where as many bytes are read as one call moves."""
    from .._threads import _core

    if problem.limit == "fma":
        dtype_char = problem.dtype.char
        return lambda: float(_core.measure_fma_peak(dtype_char, threads, FMA_SECONDS))
    data = np.ones(int(problem.amount) // 4, np.float32)
    repeats = max(3, int(READ_SECONDS * ASSUMED_BANDWIDTH / data.nbytes))
    return lambda: float(_core.measure_read_bandwidth(data, threads, repeats))
