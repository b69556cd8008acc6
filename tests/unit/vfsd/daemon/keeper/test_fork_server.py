"""The fork server notices that its installation changed; the keeper while its daemon ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from vfsd.daemon.keeper import keeping
from vfsd.daemon.keeper.fork_server import LoadedFiles
from vfsd.daemon.keeper.keeping import ANSWERED, RELEASED, SERVING_NS, Keeper, deaths_in_a_row, shared_memory
from vfsd.wire.options import MountOptions

LATER_NS = time.time_ns() + 10**15  # later than this run


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a loaded module of vfsd."""
    path = tmp_path / "example.py"
    path.write_text("x = 1\n")
    module = types.ModuleType("vfsd.example")
    module.__file__ = str(path)
    # Other tests leave modules of files that are gone.
    there = {name: each for name, each in sys.modules.items() if os.path.exists(getattr(each, "__file__", None) or "/")}
    monkeypatch.setattr(sys, "modules", {**there, "vfsd.example": module})
    return path


def test_an_installation_without_changes_is_unchanged(module_file: Path) -> None:
    assert module_file.exists()
    assert not LoadedFiles(LATER_NS).changed()


def test_a_changed_or_removed_module_is_a_change(module_file: Path) -> None:
    files = LoadedFiles(LATER_NS)
    os.utime(module_file, ns=(0, 0))
    assert files.changed()
    files = LoadedFiles(LATER_NS)
    assert not files.changed()
    module_file.unlink()
    assert files.changed()


def test_a_module_that_changed_during_the_imports_is_a_change(module_file: Path) -> None:
    started_ns = module_file.stat().st_mtime_ns
    assert LoadedFiles(started_ns).changed()


@pytest.mark.parametrize(
    ("answered", "served_s", "deaths"),
    [(0, None, 4), (0, 1, 4), (1, 1, 0), (0, 61, 0)],
    ids=["it never served", "it answered nothing", "it answered something", "nobody used it"],
)
def test_a_daemon_that_did_its_work_ends_a_row_of_deaths(answered: int, served_s: int | None, deaths: int) -> None:
    _, memory = shared_memory()
    memory[ANSWERED] = answered
    if served_s is not None:
        memory[SERVING_NS] = max(1, time.monotonic_ns() - served_s * 10**9)
    assert deaths_in_a_row(memory, 3) == deaths
    assert deaths_in_a_row(memory, deaths) == deaths + 1  # of the next daemon, which did nothing yet


# The main thread ends, and another one goes on until standard input ends: /proc has "Z" for the process.
ENDING = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("is_released", [False, True])
def test_requests_are_sent_again_only_while_nobody_serves_the_mount(
    is_released: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(keeping, "_STUCK_CHECK_S", 0.01)
    monkeypatch.setattr(Keeper, "_watch", lambda _: looked.release())
    keeper = Keeper(MountOptions.of(str(tmp_path), "ending"))
    device, keeper._device = os.pipe()
    keeper._channel, theirs = socket.socketpair()
    keeper._memory[RELEASED] = is_released
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE) as daemon, theirs:
        assert daemon.stdin is not None
        keeper._child = daemon.pid
        wait_until(lambda: b"Z (zombie)" in Path(f"/proc/{daemon.pid}/status").read_bytes(), "the main thread's end")
        waiting = threading.Thread(target=keeper._wait)
        waiting.start()
        for _ in range(3):
            looked.acquire()
        daemon.stdin.close()
        waiting.join()
        daemon.returncode = 0  # the keeper has reaped it
    os.close(keeper._device)
    with open(device, "rb") as sent:
        assert bool(sent.read()) is not is_released
    keeper._channel.close()
