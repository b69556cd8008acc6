"""The packages of vfsd's extras: what to say where one is missing."""

from __future__ import annotations

import errno
import shlex
import sys

__all__ = ["lacking"]


def lacking(what: str, error: ImportError, extra: str = "container") -> OSError:
    """The error for `what`, which needs the packages of an extra."""
    advice = f"{shlex.quote(sys.executable)} -m pip install 'vfsd[{extra}]'"
    return OSError(errno.EOPNOTSUPP, f"{what} lacks a package ({error}): {advice}")
