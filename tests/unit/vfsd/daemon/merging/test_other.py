"""Calls on the daemon of another workspace: who may be called, and what its end means."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from vfsd.daemon.merging.other import call_peer
from vfsd.operations.declaration import Empty, Peer


def served(path: Path, *answers: Callable[[socket.socket], None]) -> Peer:
    """A daemon that takes one call for each of `answers`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener:
            for answer in answers:
                with listener.accept()[0] as client:
                    answer(client)

    threading.Thread(target=serve, daemon=True).start()
    return Peer("other", str(path))


def failure(peer: Peer) -> OSError:
    with pytest.raises(OSError, match="'other'") as raised:
        trio.run(call_peer, peer, "lineage", Empty())
    return raised.value


def test_a_workspace_that_does_not_run_is_named(tmp_path: Path) -> None:
    assert failure(Peer("other", str(tmp_path / "missing"))).errno == errno.ECONNREFUSED


def test_the_daemon_of_another_user_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    user = os.geteuid()
    peer = served(tmp_path / "socket", lambda client: asked.set() if client.recv(1) else None)
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    assert failure(peer).errno == errno.EPERM
    assert not asked.is_set()


def test_a_daemon_that_ends_before_its_answer_is_an_error(tmp_path: Path) -> None:
    assert failure(served(tmp_path / "socket", lambda client: client.recv(1) and None)).errno == errno.ECONNRESET


def test_the_error_of_the_other_daemon_keeps_its_errno(tmp_path: Path) -> None:
    def answer(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"full","data":{"errno":"ENOSPC"}}}\n')

    error = failure(served(tmp_path / "socket", answer))
    assert (error.errno, error.strerror) == (errno.ENOSPC, "workspace 'other': full")


def test_a_call_that_crosses_the_closing_of_its_connection_is_made_again(tmp_path: Path) -> None:
    def close(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b'{"jsonrpc":"2.0","method":"closing","params":{}}\n')

    def answer(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')

    assert trio.run(call_peer, served(tmp_path / "socket", close, answer), "ping", Empty()) == Empty()
