"""The instruction sets of this build: which ones this CPU can run, which one is in use.

The best is chosen at import; the environment variable ``NPATTN_ISA`` chooses another.
"""

from __future__ import annotations

import os
import sys

from npattn._threads import _core

__all__ = ["active", "available", "use"]


def available() -> list[str]:
    """The instruction sets that this build has and this CPU can run, best last.

    Returns
    -------
    list of str
        Of "generic", "avx2", "avx512", "avx512bf16", "avx512amx" on x86-64; "generic", "neon" on aarch64.

    Examples
    --------
    >>> import npattn
    >>> "generic" in npattn.isa.available()
    True
    """
    return _core.isa_available()


def active() -> str:
    """The instruction set that calls use now.

    Returns
    -------
    str
        One of ``available()``.

    Examples
    --------
    >>> import npattn
    >>> npattn.isa.active() in npattn.isa.available()
    True
    """
    return _core.isa_active()


def use(name: str) -> str:
    """Use an instruction set for all calls of this process that start from now on.

    Packed matrices made before stay valid.

    Parameters
    ----------
    name : str
        One of ``available()``.

    Returns
    -------
    str
        The one in use before.

    Raises
    ------
    TypeError
        If `name` is not a str.
    ValueError
        If this build or this CPU does not have it.

    Examples
    --------
    >>> import npattn
    >>> before = npattn.isa.use("generic")
    >>> npattn.isa.use(before)
    'generic'
    """
    before = active()
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r} ({type(name).__name__})")
    if not _core.isa_use(name):
        raise ValueError(f"no instruction set {name!r} here; available: {', '.join(available())}")
    return before


def _use_environment() -> None:
    name = os.environ.get("NPATTN_ISA")
    if name and not _core.isa_use(name):
        message = f"NPATTN_ISA={name!r} is not available here; available: {', '.join(available())}"
        # Run as `python -m npattn`, whose main is not there yet to catch an error, say it in one line.
        if getattr(sys, "argv", [])[:1] == ["-m"]:
            print(f"npattn: {message}", file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


_use_environment()
