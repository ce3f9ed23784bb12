"""How many threads a call may use, and who says so.

The package imports this module before any other of its own: it is the one that loads the compiled core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import PurePosixPath
from typing import SupportsIndex

from npattn._check import as_integer

_MOST_THREADS = 4096


@contextmanager
def _short_spinning() -> Iterator[None]:
    """libgomp reads its settings when it is loaded: idle threads spin 0.1 ms, or as the user says, not 6."""
    if "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = "3000"
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


with _short_spinning():
    from npattn import _core as _core

_openmp_limit = _core.openmp_limit
_openmp_limit_at_import = _openmp_limit()
_process_threads: int | None = None  # set_num_threads
_context_threads: ContextVar[int | None] = ContextVar("npattn_threads", default=None)  # threads


def current() -> int:
    """The number of threads for a call made here and now."""
    n = _context_threads.get() or _process_threads or _default()[0]
    limit = _openmp_limit()
    return n if limit == _openmp_limit_at_import else min(n, limit)


def reason() -> str:
    """Who decided the number that `current` returns."""
    limit = _openmp_limit()
    if limit != _openmp_limit_at_import and current() == limit:
        return "the OpenMP limit of this thread (threadpoolctl or omp_set_num_threads)"
    if _context_threads.get():
        return "npattn.threads"
    if _process_threads:
        return "npattn.set_num_threads"
    return _default()[1]


def set_num_threads(n: SupportsIndex) -> int:
    """Set the number of threads that this process uses for each call.

    Parameters
    ----------
    n : int
        From 1 to 4096. More than the machine has CPUs is allowed, and slower.

    Returns
    -------
    int
        The number before. A surrounding `threads` block takes precedence over both.

    Raises
    ------
    TypeError
        If `n` is not an integer (a bool is not one).
    ValueError
        If `n` is out of range.

    Examples
    --------
    >>> import npattn
    >>> before = npattn.set_num_threads(1)
    >>> npattn.get_num_threads()
    1
    >>> npattn.set_num_threads(before)
    1
    """
    global _process_threads
    number = _checked(n)
    previous = _process_threads or _default()[0]
    _process_threads = number
    return previous


def get_num_threads() -> int:
    """Return the number of threads a call made here would use.

    It is that of the innermost `threads` block of this context, else of `set_num_threads`, else of the
    environment variable ``NPATTN_NUM_THREADS``, else the first number of ``OMP_NUM_THREADS``, else the number
    of CPUs this process may use (its affinity and its cgroup's quota, rounded up). Where the OpenMP limit of
    the calling thread has changed since the import (threadpoolctl), that limit caps it.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        If ``NPATTN_NUM_THREADS`` is needed and is not a positive integer.

    Examples
    --------
    >>> import npattn
    >>> npattn.get_num_threads() >= 1
    True
    """
    return current()


def threads(n: SupportsIndex) -> AbstractContextManager[None]:
    """Use `n` threads for each call inside a ``with`` block.

    It holds in this thread and this asyncio task (a ``ContextVar``), not in other threads. Blocks nest.

    Parameters
    ----------
    n : int
        From 1 to 4096.

    Returns
    -------
    context manager
        Good for one ``with`` block.

    Raises
    ------
    TypeError
        If `n` is not an integer (a bool is not one).
    ValueError
        If `n` is out of range.

    Examples
    --------
    >>> import npattn
    >>> with npattn.threads(1):
    ...     npattn.get_num_threads()
    1
    """
    return _in_context(_checked(n))


@contextmanager
def _in_context(n: int) -> Iterator[None]:
    token = _context_threads.set(n)
    try:
        yield
    finally:
        _context_threads.reset(token)


def _checked(n: SupportsIndex) -> int:
    """`n` as an int, if it is a number of threads."""
    number = as_integer("n", n, minimum=1)
    if number > _MOST_THREADS:
        raise ValueError(f"n must be at most {_MOST_THREADS} threads, got {number}")
    return number


@functools.cache
def _default() -> tuple[int, str]:
    """The number of threads where the program says nothing, and where it comes from."""
    text = os.environ.get("NPATTN_NUM_THREADS", "").strip()
    if text:
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_THREADS):
            raise ValueError(f"NPATTN_NUM_THREADS must be an integer from 1 to {_MOST_THREADS}, got {text!r}")
        return int(text), "NPATTN_NUM_THREADS"
    # A list has one number for each level of nesting. What is no number is for OpenMP to complain about.
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return min(int(text), _MOST_THREADS), "OMP_NUM_THREADS"
    cpus = min(_core.default_threads(), _MOST_THREADS)
    quota = _cgroup_quota()
    if quota is not None and quota < cpus:
        return quota, "the CPU quota of the cgroup"
    return cpus, "the CPUs this process may use"


def _cgroup_quota(root: str = "") -> int | None:
    """The CPUs that the quotas of this process's cgroups grant, rounded up, or None. Tests give a `root`."""
    quotas = []
    for line in _read(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, version = f"{root}/sys/fs/cgroup", 2
        elif "cpu" in controllers.split(","):
            mount, version = f"{root}/sys/fs/cgroup/cpu", 1
        else:
            continue
        # The strictest level counts. In a container the path may be the host's: the mount then is the cgroup.
        for level in (PurePosixPath(path), *PurePosixPath(path).parents):
            directory = mount + str(level).rstrip("/")
            if version == 2:
                words = _read(f"{directory}/cpu.max").split()
            else:
                words = [_read(f"{directory}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            if len(words) == 2 and all(word.isdigit() for word in words):  # not "max", -1, or a missing file
                quotas.append(max(1, -(-int(words[0]) // int(words[1]))))
    return min(quotas, default=None)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
