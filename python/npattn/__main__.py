"""The command line: python -m npattn info | demo | look | bench."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import get_num_threads


def _utf8(argument: str) -> str:
    """The text itself, also where a C locale made surrogates of its bytes."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m npattn", description="Exact attention for NumPy.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("info", help="version, ISA, threads, and a self-check against the reference")

    demo = commands.add_parser("demo", help="attention step by step, and its speed beside plain NumPy")
    demo.add_argument("--html", metavar="FILE", help="also write the demo as a self-contained page")
    demo.add_argument("--png", metavar="FILE", help="also draw the weights (needs matplotlib: npattn[plot])")

    look = commands.add_parser("look", help="what a sentence encoder looks at in a text")
    look.add_argument("--model", metavar="DIR", required=True, help="directory of all-MiniLM-L6-v2")
    look.add_argument("--query", type=_utf8, metavar="TOKEN", help="show this token's lines only")
    look.add_argument("--top", type=int, default=5, metavar="N", help="keys named per line (default 5)")
    look.add_argument("text", type=_utf8, help="the text to read")

    commands.add_parser("bench", help="speed, share of the machine's ceiling, error")
    return parser


def _run(argv: Sequence[str]) -> int:
    if argv[:1] == ["bench"]:  # it has its own arguments and its own --help
        from ._bench import main as bench

        return bench(argv[1:])
    arguments = _parser().parse_args(argv)
    if arguments.command == "info":
        from . import _info

        return _info.run(sys.stdout)
    if arguments.command == "demo":
        from . import _demo

        _demo.run(sys.stdout, html_path=arguments.html, png_path=arguments.png)
        return 0
    from . import _look

    try:
        _look.run(sys.stdout, arguments.model, arguments.text, query=arguments.query, top=arguments.top)
    except ValueError as error:  # not a model, an empty --top, an unknown --query
        return _fail(error)
    return 0


def _fail(error: Exception, code: int = 1) -> int:
    print("npattn:", " ".join(str(error).split()), file=sys.stderr)  # one line, whoever wrote the message
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0, 1 where it failed (a missing file, a failed check), 2 for what cannot
    be meant (usage, an NPATTN_ variable), 130 after Ctrl-C.
    """
    try:
        get_num_threads()
    except ValueError as error:  # NPATTN_NUM_THREADS is no number
        return _fail(error, 2)
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough; spare it a second error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (OSError, ImportError) as error:
        return _fail(error)


if __name__ == "__main__":
    sys.exit(main())
