"""A workspace without a mount: a fake daemon for clients and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fake_workspace import FakeDaemon
from vfsd.wire.options import MountOptions, Ready


@pytest.fixture
def place(workdir: Path) -> Path:
    """The mountpoint of `daemon`."""
    place = workdir / "mnt"
    place.mkdir()
    return place


@pytest.fixture
def daemon(place: Path) -> Iterator[FakeDaemon]:
    """The daemon of the workspace "demo", in which is `a.txt`."""
    with FakeDaemon("demo", str(place), live={b"a.txt": b"one\n"}) as fake:
        yield fake


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[MountOptions]:
    """The options of the mounts that are started, in the background (the mount answers) or in the foreground."""
    options: list[MountOptions] = []

    def answer(asked: MountOptions, **_: object) -> Ready:
        options.append(asked)
        workspace, recovered = asked.workspace, "the one before was dead"
        return Ready(workspace.name, workspace.mountpoint, "/run/x.sock", 42, "native", recovered=recovered)

    def foreground(asked: MountOptions, *, ready: Callable[[Ready], None]) -> None:
        ready(answer(asked))

    monkeypatch.setattr("vfsd.client.launch.launch", answer)
    monkeypatch.setattr("vfsd.daemon.main.foreground", foreground)
    return options
