"""An installed package that adds a backend: its distribution's entry point, and its module."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["install_backend"]


def install_backend(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str, *, source: str | None = None
) -> None:
    """Make `directory` a place that packages are imported from, with one that adds the backend `kind`.

    `target` is the opener as "module:function"; `source`, if given, the module's text.  Daemons started by the test
    import from there too.
    """
    metadata = directory / f"{kind}_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {kind}-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[vfsd.backends]\n{kind} = {target}\n")
    if source is not None:
        (directory / f"{target.partition(':')[0]}.py").write_text(source)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")
