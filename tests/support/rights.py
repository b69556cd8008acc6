"""Tests that only root can run: they mount, give files to others, make devices, or become another user.

They are skipped for one reason, so that the end of a run counts them together (`tests.support.progress`).
"""

from __future__ import annotations

import os

import pytest

__all__ = ["need_root", "needs_root"]

_REASON = "needs root"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason=_REASON)


def need_root() -> None:
    """Skip the present test unless it runs as root; for fixtures and helpers."""
    if os.geteuid() != 0:
        pytest.skip(_REASON)
