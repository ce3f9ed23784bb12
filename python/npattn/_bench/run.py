"""Runs the rows and writes the tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from .._terminal import Terminal
from . import accuracy, peers, report
from .measure import Row, WrongResultError, measure
from .problem import Case


def run(
    stream: TextIO,
    cases: Sequence[Case],
    *,
    rounds: int,
    seconds: float,
    with_peers: bool = False,
    json_path: str | None = None,
    markdown_path: str | None = None,
) -> int:
    """Measure `cases` and write the tables; 0, or 1 where a row was wrong or could not be computed."""
    from .. import get_num_threads

    threads = get_num_threads()
    present, absent = peers.start(threads) if with_peers else ({}, {})
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for number, case in enumerate(cases, 1):
            _progress(f"{number}/{len(cases)} {case.group}: {case.name}")
            try:
                remote = {name: peer.prepare for name, peer in present.items()}
                row = measure(case, most_rounds=rounds, most_seconds=seconds, threads=threads, remote=remote)
            except ImportError as missing:
                absent[f"{case.group}: {case.name}"] = f"{missing.name} is not installed"
            except (WrongResultError, NotImplementedError, MemoryError) as failure:
                failed.append(f"{case.group}: {case.name}: {type(failure).__name__}: {failure}")
            else:
                rows.append(row)
    finally:
        _progress("")
        for peer in present.values():
            peer.close()

    facts = report.machine({name: peer.version for name, peer in present.items()})
    tables = [report.table(rows)] if rows else []
    if rows and present:
        tables.append(report.peer_table(rows, list(present)))
    remarks = report.notes(rows) if rows else []
    remarks += [f"{name} is absent: {reason}." for name, reason in absent.items()]
    remarks += [f"FAILED {text}" for text in failed]

    _write(stream, facts, tables, remarks, markdown_path)
    if json_path is not None:
        text = json.dumps(report.as_json(facts, rows), indent=1, ensure_ascii=False)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


def run_errors(
    stream: TextIO, chosen: str, *, with_peers: bool = False, markdown_path: str | None = None
) -> int:
    """Write the table of errors of the paths with `chosen` in their names; 0."""
    from .. import get_num_threads

    present, absent = peers.start(get_num_threads(), ["torch"]) if with_peers else ({}, {})
    try:
        lines, remarks = accuracy.table(chosen, present.get("torch"))
    finally:
        for peer in present.values():
            peer.close()
    remarks += [f"{name} is absent: {reason}." for name, reason in absent.items()]
    facts = report.machine({name: peer.version for name, peer in present.items()})
    _write(stream, facts, [lines], remarks, markdown_path)
    return 0


def _write(
    stream: TextIO,
    facts: Mapping[str, Any],
    tables: Sequence[report.Table],
    remarks: Sequence[str],
    markdown_path: str | None,
) -> None:
    """The machine, the tables and the remarks, to the stream and in Markdown to the file."""
    terminal = Terminal(stream)
    for line in report.header(facts):
        terminal.line(line)
    for lines in tables:
        terminal.line()
        for line in report.aligned(lines):
            terminal.line(line)
    terminal.line()
    for line in remarks:
        terminal.line(line)
    if markdown_path is not None:
        parts = ["  \n".join(report.header(facts)), *("\n".join(report.markdown(lines)) for lines in tables)]
        Path(markdown_path).write_text("\n\n".join([*parts, "\n".join(remarks)]) + "\n", encoding="utf-8")


def _progress(text: str) -> None:
    """The row at work, on a terminal only; it overwrites itself."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
