"""Detect an unrelated distribution that installs a package named `protocol`, as vfsd does.

Imports nothing from `protocol`, because that may be the other one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import sys

import vfsd


def foreign_protocol() -> str | None:
    """Describe the `protocol` that Python finds instead of vfsd's, and what to do; None if it finds vfsd's."""
    spec = importlib.util.find_spec("protocol")
    found = os.path.dirname(spec.origin) if spec and spec.origin else None
    expected = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(vfsd.__file__))), "protocol")
    others = sorted(set(importlib.metadata.packages_distributions().get("protocol", [])) - {"vfsd"})
    if found is not None and os.path.realpath(found) == os.path.realpath(expected) and not others:
        return None
    if found is None:
        return f"vfsd's package `protocol` is not installed: {shlex.quote(sys.executable)} -m pip install vfsd again"
    names = f" of the distribution {', '.join(others)}" if others else ""
    advice = f"uninstall it and install vfsd again, or install vfsd in an environment of its own ({sys.executable})"
    return f"the package `protocol` in {found}{names} is in the way of vfsd's: {advice}"
