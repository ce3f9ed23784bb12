"""Answers of another library from a process of its own: its threads and fork handlers stay out of ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = dict[str, Any]


def answers(worker: str, calls: list[Call]) -> list[Any]:
    """What the script ``worker``, beside this file, gives for each call."""
    script = Path(__file__).with_name(worker)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, input=pickle.dumps(calls), capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return list(pickle.loads(done.stdout))


def serve(answer: Callable[..., Any]) -> None:
    """The worker's side: the calls from stdin, ``answer`` for each, the results to stdout."""
    results = [answer(**call) for call in pickle.load(sys.stdin.buffer)]
    pickle.dump(results, sys.stdout.buffer)
