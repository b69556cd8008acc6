"""The user's cache directory."""

from __future__ import annotations

import os
from collections.abc import Mapping


def cache_directory(environ: Mapping[str, str] = os.environ) -> str:
    """$XDG_CACHE_HOME/vfsd, else ~/.cache/vfsd."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG base directory specification: a relative path is ignored
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "vfsd")
