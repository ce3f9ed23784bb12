"""Timing: everybody takes a turn in every round, with the machine's ceiling before and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ceiling import measurement
from .problem import Case, Problem, errors

SAMPLE_SECONDS = 0.002  # the least a timed sample takes: short calls are repeated
SETTLE_SECONDS = 0.1  # others' idle threads may still spin that long, OpenBLAS's do
LONG_SECONDS = 0.02  # a call this long needs no untimed one before it
STEADY = 0.05  # how far the ceilings around a round may lie apart
LARGEST_ERROR = {2: 1e-2, 4: 1e-4, 8: 1e-12}  # by itemsize; more is a wrong result, not a rounding error
FEWEST_ROUNDS = 3


class WrongResultError(Exception):
    """A call that is to be timed does not compute what it should."""


@dataclass(frozen=True)
class Row:
    """A finished row. `seconds` holds each contestant's time of one call in every steady round, `ceilings`
    the larger of the two around it; `errors` are (largest, root mean square) against float64."""

    group: str
    name: str
    problem: Problem
    seconds: Mapping[str, NDArray[np.float64]]
    ceilings: NDArray[np.float64]
    unsteady: int
    errors: Mapping[str, tuple[float, float]]
    failures: Mapping[str, str]

    def shares(self, who: str) -> NDArray[np.float64]:
        """Share of the ceiling in each round."""
        shares: NDArray[np.float64] = self.problem.amount / self.seconds[who] / self.ceilings
        return shares


# Seconds of one call of a contestant: the mean of as many as fill a sample.
Timer = Callable[[], float]


def local_timer(call: Callable[[], object]) -> Timer:
    """A timer for a call in this process that has run before."""

    def run(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    once = run(1)
    if once < LONG_SECONDS:
        once = min(once, run(3))
    repeats = max(1, int(SAMPLE_SECONDS / once))

    def timer() -> float:
        time.sleep(SETTLE_SECONDS)
        if once < LONG_SECONDS:
            run(repeats)
        return run(repeats)

    return timer


def checked_error(problem: Problem, result: NDArray[np.floating]) -> tuple[float, float]:
    """The error of a result.

    Raises
    ------
    WrongResultError
        If it is wrong rather than rounded.
    """
    largest, rms = errors(problem.sample(result), problem.exact)
    allowed = problem.allowed or LARGEST_ERROR[problem.dtype.itemsize]
    if not largest <= allowed * max(1.0, float(np.abs(problem.exact).max())):
        raise WrongResultError(f"largest error {largest:.2g}")
    return largest, rms


def rounds(
    timers: Mapping[str, Timer], ceiling: Callable[[], float]
) -> Iterator[tuple[dict[str, float], float, bool]]:
    """Endless rounds: each contestant's seconds, the ceiling, and whether it stayed put."""
    while True:
        time.sleep(SETTLE_SECONDS)
        before = ceiling()
        seconds = {who: timer() for who, timer in timers.items()}
        time.sleep(SETTLE_SECONDS)
        after = ceiling()
        best = max(before, after)
        yield seconds, best, best - min(before, after) <= STEADY * best


def measure(
    case: Case,
    *,
    most_rounds: int,
    most_seconds: float,
    threads: int,
    remote: Mapping[str, Callable[[Problem], tuple[NDArray[np.floating], Timer]]] | None = None,
) -> Row:
    """Measure one row: check every result, then time rounds until there are enough steady ones or time is up.

    `remote` prepares contestants in other processes: from the problem to a result and a timer. One that
    cannot do the row raises, and the row says why.
    """
    problem = case.build()
    error = {}
    timers = {}
    failures: dict[str, str] = {}
    for who, call in {"npattn": problem.npattn, "NumPy": problem.numpy}.items():
        error[who] = checked_error(problem, call())
        timers[who] = local_timer(call)
    timers.update({who: local_timer(call) for who, call in problem.extra.items()})
    for who, prepare in (remote or {}).items():
        try:
            result, timer = prepare(problem)
            error[who] = checked_error(problem, result)
            timers[who] = timer
        except Exception as failure:  # whatever another library may raise
            failures[who] = str(failure) or type(failure).__name__

    steady: list[tuple[dict[str, float], float]] = []
    shaky: list[tuple[dict[str, float], float]] = []
    end = time.perf_counter() + most_seconds
    for seconds, ceiling, stayed in rounds(timers, measurement(problem, threads)):
        (steady if stayed else shaky).append((seconds, ceiling))
        enough = len(steady) >= FEWEST_ROUNDS or len(shaky) >= 3 * FEWEST_ROUNDS
        if len(steady) >= most_rounds or (enough and time.perf_counter() > end):
            break
    kept = steady if len(steady) >= FEWEST_ROUNDS else steady + shaky
    return Row(
        group=case.group,
        name=case.name,
        problem=problem,
        seconds={who: np.array([seconds[who] for seconds, _ in kept]) for who in timers},
        ceilings=np.array([ceiling for _, ceiling in kept]),
        unsteady=len(shaky),
        errors=error,
        failures=failures,
    )
