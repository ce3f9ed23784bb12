"""python -m npattn bench: the speed of every kernel beside plain NumPy and the machine's ceiling."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

# They bind NumPy's BLAS to another kernel than it would choose; it reads them while it is loaded.
BLAS_HANDICAPS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m npattn bench",
        description="Speed of npattn beside plain NumPy and the machine's ceiling, with the errors of both.",
    )
    parser.add_argument("--peers", action="store_true", help="also torch, onnxruntime, openvino, jax")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="the errors of each path in each dtype on four kinds of inputs instead (--peers: torch's too)",
    )
    parser.add_argument("--filter", metavar="TEXT", default="", help='only rows with TEXT in "group: name"')
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=15, help="rounds a row at most (default 15)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        default=2.5,
        help="time for a row (default 2.5; three rounds at least)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every round's times")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables in Markdown")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    return parser


def _errors(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """The table of errors."""
    if arguments.json or arguments.list:
        parser.error("--errors goes with --peers, --filter and --markdown alone")
    from .accuracy import PATHS
    from .run import run_errors

    if not any(arguments.filter.lower() in path.name for path in PATHS):
        names = "; ".join(path.name for path in PATHS)
        parser.error(f"--filter: no path has {arguments.filter!r} in its name: {names}")
    return run_errors(
        sys.stdout, arguments.filter, with_peers=arguments.peers, markdown_path=arguments.markdown
    )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark with these arguments; 0, or 1 where a row's result was wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    if any(name in os.environ for name in BLAS_HANDICAPS):
        environment = {name: value for name, value in os.environ.items() if name not in BLAS_HANDICAPS}
        command = [sys.executable, "-m", "npattn", "bench", *argv]
        return subprocess.run(command, env=environment, check=False).returncode
    if arguments.errors:
        return _errors(parser, arguments)
    from .cases import CASES

    wanted = arguments.filter.lower().replace(":", "")
    cases = [case for case in CASES if wanted in f"{case.group} {case.name}".lower()]
    if not cases:
        parser.error(f"--filter: no row has {arguments.filter!r} in its name; --list names them")
    if arguments.list:
        print("\n".join(f"{case.group}: {case.name}" for case in cases))
        return 0
    from .run import run

    return run(
        sys.stdout,
        cases,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        with_peers=arguments.peers,
        json_path=arguments.json,
        markdown_path=arguments.markdown,
    )
