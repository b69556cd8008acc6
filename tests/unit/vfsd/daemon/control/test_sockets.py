"""How the control socket comes to its path, and goes."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.unit.vfsd.daemon.control.conftest import peer, serving
from vfsd.wire.sockets import BoundSocket, bind, connect


def test_the_socket_is_its_owners_alone_whatever_the_umask(path: str) -> None:
    before = os.umask(0)
    try:
        bound = bind(path)
    finally:
        os.umask(before)
    found = os.lstat(path)
    bound.close()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_binding_leaves_nothing_but_the_socket_and_closing_nothing(path: str, workdir: Path) -> None:
    bound = bind(path)
    assert os.listdir(workdir) == ["x.sock"]
    bound.close()
    assert os.listdir(workdir) == []


def test_a_dead_socket_is_replaced(path: str) -> None:
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert os.path.exists(path)
    bound = bind(path)
    connect(path).close()
    bound.close()


def test_a_living_socket_is_never_replaced(path: str) -> None:
    bound = bind(path)
    with pytest.raises(FileExistsError, match="another daemon is listening") as caught:
        bind(path)
    assert caught.value.filename == path
    connect(path).close()
    bound.close()


def test_a_living_socket_whose_backlog_is_full_is_never_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        with connect(path), pytest.raises(FileExistsError):
            bind(path)


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_what_is_no_socket_is_left_alone(path: str, kind: str) -> None:
    {"file": lambda: Path(path).write_text("precious"), "directory": lambda: os.mkdir(path)}.get(
        kind, lambda: os.symlink("/dev/null", path)
    )()
    with pytest.raises(FileExistsError, match="not a socket"):
        bind(path)
    assert os.path.lexists(path)


def test_closing_leaves_a_socket_that_took_the_place(path: str) -> None:
    first = bind(path)
    os.unlink(path)
    second = bind(path)
    first.close()
    connect(path).close()
    second.close()
    assert not os.path.exists(path)


def test_of_many_daemons_that_start_at_once_one_gets_the_path(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    ready = threading.Barrier(8)
    won: list[BoundSocket] = []
    refused: list[FileExistsError] = []

    def start() -> None:
        ready.wait()
        try:
            won.append(bind(path))
        except FileExistsError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    connect(path).close()
    won[0].close()


async def test_a_server_can_be_used_as_soon_as_it_has_started_and_cleans_up(path: str) -> None:
    for _ in range(3):
        async with serving(path), peer(path) as client:
            assert await client.is_alive()
        assert not os.path.exists(path)


async def test_a_second_server_on_a_living_socket_fails_and_the_first_goes_on(path: str) -> None:
    async with serving(path):
        with pytest.raises(ExceptionGroup) as caught:
            async with serving(path):
                pass
        assert caught.group_contains(FileExistsError)
        async with peer(path) as client:
            assert await client.is_alive()
