"""Signals that arrive while a command waits for the daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A daemon, in a thread. When it has a request, the signal comes to that thread and interrupts no system call of the
# command's: for the command, it came before recv(2), at the last moment.
PROGRAM = """
import json, signal, socket, sys, threading
from vfsd.cli.common.app import interruptible, waking
from vfsd.client.connection import ControlClient
from vfsd.operations.catalogue import OPERATIONS

path, method = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()

def daemon():
    client, _ = listener.accept()
    lines = client.makefile("rwb")
    request = json.loads(lines.readline())
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    if method == "restore":
        assert json.loads(lines.readline())["method"] == "cancel"
        error = {"code": -32000, "message": "cancelled", "data": {"errno": "ECANCELED"}}
        lines.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode() + b"\\n")
        lines.flush()
    lines.read()

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=daemon, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
client = ControlClient(path)
try:
    if method == "watch":
        with waking(client):
            list(client.stream(type("Call", (), {"method": method, "params": None})))
    else:
        with interruptible(client, OPERATIONS[method]):
            client.call(method)
except KeyboardInterrupt as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("method", "outcome"),
    [
        ("restore", "Interrupted: stopped: nothing was changed\n"),
        ("status", "KeyboardInterrupt: \n"),
        ("watch", "KeyboardInterrupt: \n"),
    ],
)
def test_a_signal_between_two_system_calls_is_not_lost(tmp_path: Path, method: str, outcome: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "sock"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (outcome, "")
