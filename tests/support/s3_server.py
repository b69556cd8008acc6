"""A real S3 server on a loopback port, and a proxy that injects faults between it and a client.

The server is moto's, from PyPI: it is maintained, keeps objects in memory, and answers conditional creates
(`If-None-Match: *`) with 412 as S3 does.  Of the others, rclone in Debian 12 is older than `rclone serve s3`, s3rver on
npm (last release 2021) is older than conditional creates, and MinIO and Ceph's radosgw are in no registry that CI uses.
moto checks the condition and stores the object in two steps, so `main` lets one PUT in at a time.

`python -m tests.support.s3_server` prints its port, and ends with its standard input.
"""

from __future__ import annotations

import http.client
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BUCKET = "bucket"
REPOSITORY = Path(__file__).parents[2]
# moto reads the service and the region, and no signature.
AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
)
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}


def options(port: int) -> dict[str, str]:
    """The options of `open_storage` for the server, or a proxy, at a port."""
    return {"endpoint": f"http://127.0.0.1:{port}", "allow_http": "true"} | {
        name.lower(): value for name, value in KEYS.items()
    }


@contextmanager
def s3_server() -> Iterator[int]:
    """Run the server with an empty bucket; yield its port."""
    command = [sys.executable, "-m", "tests.support.s3_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as server:
        assert server.stdin
        assert server.stdout
        port = int(server.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", f"/{BUCKET}", headers={"Authorization": AUTHORIZATION})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        yield port
        server.stdin.close()
        server.kill()


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)
    one_put = threading.Lock()

    def atomic(environ: Any, start: Any) -> Any:
        if environ["REQUEST_METHOD"] == "PUT":
            with one_put:
                return list(application(environ, start))
        return application(environ, start)

    server = make_server("127.0.0.1", 0, atomic, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


# -- faults ------------------------------------------------------------------------------------------
Fault = Callable[[str, str], str | None]
"""From method and path to a status with S3's code, such as "503" or "403 AccessDenied", "reset", "truncate", "corrupt",
"lost", or None: no fault."""


class FaultyProxy:
    """A proxy that counts requests and bytes, and does what `fault` says.  "lost": the server answers, the client
    does not hear it."""

    def __init__(self, port: int, fault: Fault = lambda _method, _path: None, delay_s: float = 0.0) -> None:
        self.fault = fault
        self.delay_s = delay_s
        self.requests: list[tuple[str, str]] = []
        self.sent_bytes = 0  # to the client
        self.received_bytes = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def _forward(self) -> None:
                proxy.forward(self, port)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def headers(self, received: dict[str, str]) -> dict[str, str]:
        """The headers of a request to the server."""
        return received

    def forward(self, client: BaseHTTPRequestHandler, port: int) -> None:
        method, path = client.command, client.path
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        with self._lock:
            self.requests.append((method, path))
            self.received_bytes += len(body)
            fault = self.fault(method, path)
        time.sleep(self.delay_s)
        if fault is not None and fault[0].isdigit():
            status, _, code = fault.partition(" ")
            return _answer(client, int(status), [], f"<Error><Code>{code or 'SlowDown'}</Code></Error>".encode())
        if fault == "reset":
            return _reset(client)
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        server.request(method, path, body, self.headers(dict(client.headers.items())))
        answer = server.getresponse()
        data = answer.read()
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
        server.close()
        if fault == "lost":
            return _reset(client)
        if fault == "corrupt" and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        with self._lock:
            self.sent_bytes += len(data)
        if method == "HEAD":
            return _answer(client, answer.status, headers, None, answer.getheader("Content-Length"))
        if fault == "truncate":
            _answer(client, answer.status, headers, data[: len(data) // 2], str(len(data)))
            return _reset(client)
        return _answer(client, answer.status, headers, data)


_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}


def _answer(
    client: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes | None,
    length: str | None = None,
) -> None:  # fmt: skip
    client.send_response(status)
    for name, value in headers:
        client.send_header(name, value)
    client.send_header("Content-Length", length or str(len(data or b"")))
    client.end_headers()
    client.wfile.write(data or b"")


def _reset(client: BaseHTTPRequestHandler) -> None:
    client.close_connection = True
    client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.connection.close()
    client.wfile = client.rfile = open("/dev/null", "r+b")  # noqa: SIM115 (what the handler flushes)


if __name__ == "__main__":
    main()
