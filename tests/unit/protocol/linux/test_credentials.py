"""Credentials of object stores: who has them, and who sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import ctypes, json, os, subprocess, sys
from protocol.linux import credentials

getattr(credentials, sys.argv[1])()
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
child = "import os; print(os.environ.get('AWS_SECRET_ACCESS_KEY'))"
print(json.dumps({
    "proc": open("/proc/self/environ").read().count("s3cret"),
    "own": os.environ.get("AWS_SECRET_ACCESS_KEY"),
    "getenv": (libc.getenv(b"AWS_SECRET_ACCESS_KEY") or b"").decode(),
    "child": subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip(),
    "needy": credentials.environment()["AWS_SECRET_ACCESS_KEY"],
    "other": credentials.environment()["OTHER"],
}))
"""


def facts(function: str) -> dict[str, object]:
    environment = {**os.environ, "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_SESSION_TOKEN": "", "OTHER": "x"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, function], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_hidden_credentials_are_passed_on_only_on_request() -> None:
    assert facts("hide") == {"proc": 0, "own": None, "getenv": "", "child": "None", "needy": "s3cret", "other": "x"}


def test_scrubbed_credentials_work_and_no_other_process_reads_them() -> None:
    seen = {"proc": 0, "own": "s3cret", "getenv": "s3cret", "child": "s3cret", "needy": "s3cret", "other": "x"}
    assert facts("scrub") == seen
