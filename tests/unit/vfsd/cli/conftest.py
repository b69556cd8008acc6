"""A fake workspace for commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_workspace import FakeDaemon


@pytest.fixture
def daemon(daemon: FakeDaemon, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    """The daemon of the workspace that commands take, in which is `src/main.c`, too."""
    monkeypatch.chdir(workdir)
    monkeypatch.setenv("VFSD_WORKSPACE", "demo")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    daemon.live[b"src/main.c"] = b"int x;\n"
    return daemon
