"""Error messages for missing optional dependencies."""

from __future__ import annotations

import errno
import shlex
import sys


def missing_package(feature: str, error: ImportError, extra: str = "container") -> OSError:
    """Return the error for `feature`, which needs the packages that `pip install 'vfsd[EXTRA]'` adds."""
    advice = f"{shlex.quote(sys.executable)} -m pip install 'vfsd[{extra}]'"
    return OSError(errno.EOPNOTSUPP, f"{feature} lacks a package ({error}): {advice}")
