"""A Podman service that holds back one answer: so that a test acts after a step and before vfsd knows of it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 16


class HeldService:
    """Passes everything on to the service at `target`, but holds the answer to the first request that matches.

    `request` is a regular expression for its first line: "POST .*/containers/create".
    """

    def __init__(self, path: Path, target: str, request: str) -> None:
        self.url = f"unix://{path}"
        self._target = target
        self._request = re.compile(request.encode())
        self._is_reached = threading.Event()
        self._is_released = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def wait_held(self) -> None:
        """Return when Podman has answered the request, and the answer is held."""
        assert self._is_reached.wait(_TIMEOUT_S), "the request did not come"

    def release(self) -> None:
        self._is_released.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        acceptor = threading.Thread(target=self._accept)
        acceptor.start()
        try:
            yield
        finally:
            self.release()
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(2)
            acceptor.join()
            self._listener.close()

    def _accept(self) -> None:
        threads = []
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(client,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as service:
            service.connect(self._target)
            holds = threading.Event()
            back = threading.Thread(target=self._pass_back, args=(service, client, holds))
            back.start()
            while data := _received(client):
                if self._request.match(data):
                    with self._lock:
                        if not self._is_released.is_set() and not self._is_reached.is_set():
                            holds.set()
                service.sendall(data)
            service.shutdown(socket.SHUT_WR)
            back.join()

    def _pass_back(self, service: socket.socket, client: socket.socket, holds: threading.Event) -> None:
        while data := _received(service):
            if holds.is_set():
                self._is_reached.set()
                self._is_released.wait()
            try:
                client.sendall(data)
            except OSError:  # the client has gone
                return
        try:
            client.shutdown(socket.SHUT_WR)
        except OSError:
            return


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_PIECE_BYTES)
    except OSError:
        return b""
