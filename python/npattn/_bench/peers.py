"""Other libraries, each in a process of its own: started once, given a row, told when it is their turn."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .measure import LONG_SECONDS, SAMPLE_SECONDS, SETTLE_SECONDS, Timer
from .problem import PeerTask, Problem

NAMES = ("torch", "onnxruntime", "openvino", "jax")


class PeerError(Exception):
    """What a peer answered instead of a result."""


class Peer:
    """A library's process. `prepare` gives it a row and returns its result and its timer."""

    def __init__(self, name: str, threads: int) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        worker = Path(__file__).with_name("peer_worker.py")
        # -I: neither the worker's folder nor the current one is searched for modules.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(worker), name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            self.version = str(self._answer())
        except PeerError:
            self.close()
            raise

    def prepare(self, problem: Problem) -> tuple[NDArray[np.floating], Timer]:
        """The peer's result for `problem`, and a timer of its call."""
        if problem.peer is None:
            raise PeerError("not compared on this row")
        result = self.result(problem.peer)
        self._ask(("run", 1))
        once = float(self._ask(("run", 1)))
        if once < LONG_SECONDS:
            once = min(once, float(self._ask(("run", 3))))
        repeats = max(1, int(SAMPLE_SECONDS / once))

        def timer() -> float:
            time.sleep(SETTLE_SECONDS)
            if once < LONG_SECONDS:
                self._ask(("run", repeats))
            return float(self._ask(("run", repeats)))

        return result, timer

    def result(self, task: PeerTask) -> NDArray[np.floating]:
        """The peer's result."""
        result: NDArray[np.floating] = self._ask(("prepare", task.kind, task.arrays, dict(task.options)))
        return result

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _ask(self, request: tuple[Any, ...]) -> Any:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pickle.dump(request, pipe, protocol=5)
            pipe.flush()
        except BrokenPipeError:
            raise PeerError("its process ended") from None
        return self._answer()

    def _answer(self) -> Any:
        pipe = self._process.stdout
        assert pipe is not None
        try:
            state, value = pickle.load(pipe)
        except EOFError:
            raise PeerError("its process ended") from None
        if state == "failed":
            raise PeerError(value)
        return value


def start(threads: int, names: Sequence[str] = NAMES) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that are installed and start, and why the others are absent."""
    present, absent = {}, {}
    for name in names:
        if importlib.util.find_spec(name) is None:
            absent[name] = "not installed"
            continue
        try:
            present[name] = Peer(name, threads)
        except PeerError as failure:
            absent[name] = str(failure)
    return present, absent
