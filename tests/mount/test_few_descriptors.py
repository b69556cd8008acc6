"""A daemon without free descriptors: calls and requests through the mount are answered, and it recovers."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import backend_over
from vfsd.client.workspace import Workspace

_LIMIT = 48
_FILES = 60


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "overlay", "host"])
def test_with_all_descriptors_in_use_calls_are_answered(workdir: Path, backend: str) -> None:
    kind = backend_over(backend, workdir / "low")
    place = workdir / "m"
    place.mkdir()
    command = f"ulimit -n {_LIMIT}; exec {sys.executable} -m vfsd.cli.main mount {place} --backend {kind}"
    if backend == "host":
        command += f" --store {workdir / 'store'}"
    subprocess.run(["sh", "-c", command], check=True, timeout=60, stdout=subprocess.DEVNULL)
    with Workspace.attach(str(place)) as workspace:
        try:
            _use_up_and_call(workspace, place, workdir)
        finally:
            workspace.unmount(lazy=True)


def _use_up_and_call(workspace: Workspace, place: Path, workdir: Path) -> None:
    for number in range(_FILES):
        (place / f"{number}").write_text("content")
    orphans, clients = [], []
    try:
        for number in range(_FILES):  # a host workspace keeps a descriptor for each
            try:
                orphans.append(os.open(place / f"{number}", os.O_RDWR))
                os.unlink(place / f"{number}")
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                break
        for _ in range(_LIMIT):
            clients.append(client := socket.socket(socket.AF_UNIX))
            client.connect(os.path.join(os.environ["VFSD_RUNTIME_DIR"], "vfsd", workspace.name + ".sock"))
        assert workspace.status().pid == workspace.pid
        for call in (
            lambda: workspace.snapshot("busy"),
            lambda: workspace.export(workdir / "busy.zip"),
            lambda: workspace.diff("busy"),
        ):
            try:
                call()
            except FileNotFoundError:
                pass  # the snapshot was one of the calls that failed
            except OSError as error:
                if f"may have {_LIMIT} files open" not in str(error):
                    raise
        assert place.stat()
    finally:
        for descriptor in orphans:
            os.close(descriptor)
        for client in clients:
            client.close()
    workspace.snapshot("free")
    (place / "new").write_text("new")
    assert workspace.restore("free").counts.total == 1
    workspace.export(workdir / "free.zip")
