"""The finished rows: as an aligned table, in Markdown, as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._info import cpu_model
from .._terminal import display_width, pad
from .measure import Row

Table = list[list[str]]


def machine(peers: Mapping[str, str]) -> dict[str, Any]:
    """What the rows were measured on."""
    from .. import __version__, get_num_threads, isa

    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "isa": isa.active(),
        "threads": get_num_threads(),
        "npattn": __version__,
        "numpy": np.__version__,
        "blas": blas(),
        "python": platform.python_version(),
        "peers": dict(peers),
    }


def blas() -> str:
    """NumPy's BLAS as threadpoolctl sees it in this process: library, kernel, threads."""
    try:
        from threadpoolctl import threadpool_info  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return "unknown (install threadpoolctl)"
    found = [
        f"{pool['internal_api']} {pool.get('version')} "
        f"({pool.get('architecture', 'unknown kernel')}, {pool['num_threads']} threads)"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return ", ".join(found) or "unknown"


def header(facts: Mapping[str, Any]) -> list[str]:
    """The machine in two lines."""
    peers = "".join(f", {name} {version}" for name, version in facts["peers"].items())
    return [
        f"{facts['cpu']}, {facts['cpus']} CPUs; "
        f"npattn {facts['npattn']} on {facts['isa']}, {facts['threads']} threads",
        f"NumPy {facts['numpy']}, {facts['blas']}{peers}",
    ]


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> str:
    low, median, high = np.percentile(numerator / denominator, (25, 50, 75))
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def _rate(row: Row, who: str) -> str:
    rate = row.problem.amount / float(np.median(row.seconds[who])) / 1e9
    return f"{rate:.3g} {'GFLOP/s' if row.problem.limit == 'fma' else 'GB/s'}"


def _share(row: Row, who: str) -> str:
    shares = 100 * row.shares(who)
    return f"{shares.max():.0f} ({np.median(shares):.0f})"


def table(rows: Sequence[Row]) -> Table:
    """npattn beside NumPy."""
    lines = [["", "work", "time", "rate", "% of ceiling", "NumPy", "times as fast", "max error", "rms error"]]
    group = ""
    for row in rows:
        ours, theirs = row.errors["npattn"], row.errors["NumPy"]
        lines.append(
            [
                row.group if row.group != group else "",
                row.name + (" ~" if row.unsteady >= len(row.ceilings) else ""),
                _seconds(float(np.median(row.seconds["npattn"]))),
                _rate(row, "npattn"),
                _share(row, "npattn"),
                _seconds(float(np.median(row.seconds["NumPy"]))),
                _ratio(row.seconds["NumPy"], row.seconds["npattn"]),
                f"{ours[0]:.1e} ({theirs[0]:.1e})",
                f"{ours[1]:.1e} ({theirs[1]:.1e})",
            ]
        )
        group = row.group
    return lines


def peer_table(rows: Sequence[Row], peers: Sequence[str]) -> Table:
    """Everybody's share of the ceiling, and how many times as fast npattn is."""
    lines = [["", "work", "npattn, % of ceiling", *[f"{who}: %, times slower" for who in ("NumPy", *peers)]]]
    group = ""
    for row in rows:
        if row.problem.peer is None:
            continue
        cells = [
            f"{_share(row, who)}, {_ratio(row.seconds[who], row.seconds['npattn'])}"
            if who in row.seconds
            else "-"
            for who in ("NumPy", *peers)
        ]
        lines.append([row.group if row.group != group else "", row.name, _share(row, "npattn"), *cells])
        group = row.group
    return lines


def notes(rows: Sequence[Row]) -> list[str]:
    """What the columns mean, and the timings beside the rows."""
    lines = [
        "Medians over interleaved rounds. The ceiling (multiply-adds in registers, or reading as many bytes)",
        "is measured before and after each round: % of ceiling is the best round's (median). times as fast:",
        "median (quartiles). Errors are against a wider dtype (NumPy's). Rounds in which the ceiling moved",
        "by more than 5 % are left out; ~ marks rows with too few others. NumPy computes half types and int8",
        "in float32, from float32. The ceiling of float16 and of int8 weights is float32's.",
    ]
    for row in rows:
        for name in row.problem.extra:
            ratio = _ratio(row.seconds["npattn"], row.seconds[name])
            lines.append(f"{row.name}: npattn takes {ratio} times as long as {name}.")
        if row.problem.peer is not None:
            for who, reason in row.failures.items():
                lines.append(f"{who} is left out of {row.name}: {reason[:90]}.")
    return lines


def aligned(lines: Table) -> list[str]:
    """Columns side by side: the first two to the left, numbers to the right."""
    widths = [max(display_width(line[column]) for line in lines) for column in range(len(lines[0]))]
    columns = list(enumerate(widths))
    return [
        "  ".join(pad(line[column], width, right=column > 1) for column, width in columns).rstrip()
        for line in lines
    ]


def markdown(lines: Table) -> list[str]:
    """The same as a Markdown table."""
    rule = ["---"] * 2 + ["---:"] * (len(lines[0]) - 2)
    return ["| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])]


def as_json(facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured, round by round."""
    return {
        "machine": dict(facts),
        "rows": [
            {
                "group": row.group,
                "name": row.name,
                "dtype": str(row.problem.dtype),
                "limit": row.problem.limit,
                "amount": row.problem.amount,
                "ceilings": row.ceilings.tolist(),
                "unsteady_rounds": row.unsteady,
                "failures": dict(row.failures),
                "contestants": {
                    who: {
                        "seconds": seconds.tolist(),
                        "share_best": float(row.shares(who).max()),
                        "share_median": float(np.median(row.shares(who))),
                        "max_error": row.errors[who][0] if who in row.errors else None,
                        "rms_error": row.errors[who][1] if who in row.errors else None,
                    }
                    for who, seconds in row.seconds.items()
                },
            }
            for row in rows
        ],
    }
