"""The rows of `python -m npattn bench` in pytest-benchmark: npattn and plain NumPy, a group a row."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import npattn
import numpy as np
import pytest
from npattn._bench import BLAS_HANDICAPS, ceiling, measure, report
from npattn._bench.cases import CASES
from npattn._bench.problem import Case, Problem

FACTS = report.machine({})
SUMMARY = [["", "work", "", "rate", "% of ceiling", "max error", "rms error"]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs the rows of its module's GROUPS, each by npattn and by NumPy."""
    cases = [case for case in CASES if case.group in metafunc.module.GROUPS]
    pairs = [(case, who) for case in cases for who in ("npattn", "NumPy")]
    names = [f"{case.group}: {case.name}-{who}" for case, who in pairs]
    metafunc.parametrize(("case", "who"), pairs, ids=names)


@lru_cache(maxsize=1)
def problem_of(case: Case) -> Problem:
    """The arrays of a row, shared by npattn's and NumPy's test, which run one after the other."""
    return case.build()


@pytest.fixture
def run_row(benchmark: Any) -> Callable[[Case, str], None]:
    """Check the result of a row, time it, and note its rate, its share of the ceiling, and its error."""

    def run(case: Case, who: str) -> None:
        try:
            problem = problem_of(case)
        except ImportError as missing:
            pytest.skip(f"{missing.name} is not installed")
        call = problem.npattn if who == "npattn" else problem.numpy
        largest, rms = measure.checked_error(problem, call())
        benchmark.group = f"{case.group}: {case.name}"
        ceiling_now = ceiling.measurement(problem, npattn.get_num_threads())
        ceilings, seconds, steady = timed(benchmark, call, ceiling_now)

        unit = "GFLOP/s" if problem.limit == "fma" else "GB/s"
        shares = problem.amount / seconds / ceilings
        benchmark.extra_info.update(
            {
                unit: problem.amount / float(np.median(seconds)) / 1e9,
                "ceiling": "fma peak" if problem.limit == "fma" else "read bandwidth",
                f"ceiling, {unit}": float(np.median(ceilings)) / 1e9,
                "share of ceiling, best": float(shares.max()),
                "share of ceiling, median": float(np.median(shares)),
                "max error": largest,
                "rms error": rms,
                "steady rounds": steady,
                **{name: FACTS[name] for name in ("cpu", "isa", "threads", "blas")},
            }
        )
        rate = f"{benchmark.extra_info[unit]:.3g} {unit}"
        share = f"{100 * shares.max():.0f} ({100 * np.median(shares):.0f})"
        SUMMARY.append([case.group, case.name, who, rate, share, f"{largest:.1e}", f"{rms:.1e}"])

    return run


def timed(
    benchmark: Any, call: Callable[[], object], ceiling_now: Callable[[], float]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Time `call`: ceilings and seconds of the rounds in which the ceiling stayed put (of all if none did),
    and their number. The ceiling is measured around every round, for short calls around all rounds.
    """
    once = measure.local_timer(call)()
    if once < measure.SAMPLE_SECONDS:
        ceilings = [ceiling_now()]
        iterations = max(1, int(measure.SAMPLE_SECONDS / once))
        benchmark.pedantic(call, iterations=iterations, rounds=50, warmup_rounds=2)
        ceilings.append(ceiling_now())
        seconds = np.array(benchmark.stats.stats.data) if benchmark.enabled else np.array([once])
        stayed = min(ceilings) >= (1 - measure.STEADY) * max(ceilings)
        return np.full(len(seconds), max(ceilings)), seconds, len(seconds) if stayed else 0

    ceilings = []

    def before_round() -> None:
        ceilings.append(ceiling_now())
        if once < measure.LONG_SECONDS:
            call()

    benchmark.pedantic(call, setup=before_round, iterations=1, rounds=max(5, min(30, int(2.0 / once))))
    ceilings.append(ceiling_now())
    seconds = np.array(benchmark.stats.stats.data) if benchmark.enabled else np.array([once])
    around = np.array([ceilings[:-1], ceilings[1:]])[:, -len(seconds) :]
    steady = around.min(axis=0) >= (1 - measure.STEADY) * around.max(axis=0)
    kept = steady if steady.any() else np.ones_like(steady)
    return around.max(axis=0)[kept], seconds[kept], int(steady.sum())


def pytest_report_header() -> list[str]:
    lines = report.header(FACTS)
    found = [f"{name}={os.environ[name]}" for name in BLAS_HANDICAPS if name in os.environ]
    if found:
        lines.append(f"{', '.join(found)} binds NumPy's BLAS to one kernel: unset it to compare fairly")
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("share of the machine's ceiling, best round (median), and error")
    for line in report.aligned(SUMMARY):
        terminalreporter.write_line(line)
