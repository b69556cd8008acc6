"""`vfsd web` as a program: its URL, its end, and wrong use."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from tests.support.waiting import wait_until
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["web", *map(str, words)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(workspace: Workspace, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "vfsd.cli.main", "-w", "demo", "--json", "web"]
    Path(workspace.path, "big").write_bytes(bytes(16 << 20))  # more than the kernel takes for a client
    slow: list[socket.socket] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        url = urlsplit(json.loads(program.stdout.readline())["url"])
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=20)
        try:
            connection.request("GET", f"{url.path}?{url.query}")
            answer = connection.getresponse()
            assert answer.status == 200
            assert b"url=/w/demo/" in answer.read()
            # An open connection for events does not delay the end.
            cookie = (answer.headers["set-cookie"] or "").split(";")[0]
            connection.request("GET", "/events", headers={"cookie": cookie})
            assert connection.getresponse().readline() == b"event: ready\n"
            # Neither does a client that does not read its download, or does not send all of a form.
            head = f"HTTP/1.1\r\nHost: {url.netloc}\r\nOrigin: http://{url.netloc}\r\nCookie: {cookie}\r\n"
            form = f"{head}Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\npart"
            for request in (f"GET /api/filesystem/file?path=big {head}\r\n", f"POST /w/demo/snapshot {form}"):
                slow.append(socket.create_connection((url.hostname or "", url.port or 0), timeout=20))
                slow[-1].sendall(request.encode())
            assert slow[0].recv(12) == b"HTTP/1.1 200"
            os.kill(program.pid, number)
            assert program.wait(20) == 128 + number
        finally:
            for each in (connection, *slow):
                each.close()
            program.kill()
        assert program.stderr is not None
        assert program.stderr.read() == ""


def test_the_browser_is_started_with_a_ticket_that_others_cannot_use_again(tmp_path: Path) -> None:
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/url\n')
    program.chmod(0o755)
    words = [sys.executable, "-m", "vfsd.cli.main", "--json", "web", "--open"]
    environment = {**os.environ, "BROWSER": f"{program} %s &"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            printed = urlsplit(json.loads(server.stdout.readline())["url"])
            wait_until((tmp_path / "url").exists, "the browser was started")
            opened = urlsplit((tmp_path / "url").read_text().strip())
            token = parse_qs(printed.query)["token"][0]
            assert (opened.netloc, token in opened.query) == (printed.netloc, False)
            for status in (200, 401):
                connection = http.client.HTTPConnection(opened.hostname or "", opened.port, timeout=20)
                connection.request("GET", f"/?{opened.query}")
                assert connection.getresponse().status == status
                connection.close()
        finally:
            server.terminate()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("--port", str(other.getsockname()[1]))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "cannot listen at 127.0.0.1" in result.stderr


def test_a_file_that_is_no_archive_is_one_line(workdir: Path) -> None:
    (workdir / "no.zip").write_text("no archive")
    for name in ("no.zip", "missing.zip", "missing.jsonl"):
        result = run(workdir / name)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
        assert name.split(".")[0] in result.stderr


def test_a_workspace_that_does_not_run_is_one_line() -> None:
    result = run("-w", "none")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vfsd.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypercorn.config", None)
    result = run()
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "[web]" in result.stderr
