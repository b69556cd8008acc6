"""Directories for fixtures that outlive a test, below the session's own."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["new_directory"]


def new_directory(session_dir: str, name: str) -> Path:
    """A new directory that begins with `name`, and that other users may enter.

    A worker may set a module's fixture up twice: it gets some tests of a module later, from another worker.
    """
    path = Path(tempfile.mkdtemp(dir=f"{session_dir}/work", prefix=f"{name}-"))
    path.chmod(0o755)
    return path
