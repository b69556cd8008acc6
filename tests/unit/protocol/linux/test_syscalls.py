"""System calls that Python lacks, the priority of threads that compute for long, and credentials in the environment."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from protocol.linux import syscalls
from protocol.linux.syscalls import filesystem_type


@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_the_type_of_a_file_system_is_that_of_stat(path: str) -> None:
    wanted = subprocess.run(["stat", "-f", "-c", "%t", path], check=True, capture_output=True, text=True).stdout
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert filesystem_type(descriptor) == int(wanted, 16)
    finally:
        os.close(descriptor)


def test_the_type_of_no_file_system_is_unknown() -> None:
    assert filesystem_type(-1) == 0


_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275, "riscv64": 275}
MILLISECOND_NS = 1_000_000


def nice_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def turn_ns_of_this_thread() -> int:
    """As the kernel has it: sched_getattr(2)."""
    buffer = ctypes.create_string_buffer(48)
    call = _SCHED_GETATTR[os.uname().machine]
    assert ctypes.CDLL(None).syscall(call, threading.get_native_id(), buffer, 48, 0) == 0
    return int(struct.unpack_from("=IIQiIQ", buffer.raw)[5])


T = TypeVar("T")


def in_a_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_that_gives_way_is_nicer_than_those_beside_it() -> None:
    before = nice_of_this_thread()

    def giving_way() -> int:
        syscalls.lower_priority()
        return nice_of_this_thread()

    assert in_a_thread(giving_way) == min(before + 10, 19)
    assert nice_of_this_thread() == before
    assert in_a_thread(nice_of_this_thread) == before


@pytest.mark.skipif(os.uname().machine not in _SCHED_GETATTR, reason="the number of sched_getattr(2) here is not known")
def test_its_turns_are_longer_where_the_kernel_knows_turns() -> None:
    def giving_way() -> tuple[int, int]:
        before = turn_ns_of_this_thread()
        syscalls.lower_priority()
        return before, turn_ns_of_this_thread()

    before, after = in_a_thread(giving_way)
    assert after == (10 * MILLISECOND_NS if before else 0)  # 0: Linux before 6.12


def test_a_policy_that_was_chosen_stays() -> None:
    def idle() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        syscalls.lower_priority()
        return os.sched_getscheduler(0), nice_of_this_thread()

    assert in_a_thread(idle) == (os.SCHED_IDLE, min(nice_of_this_thread() + 10, 19))


def test_where_it_is_forbidden_things_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(syscalls, "_SCHED_SETATTR", {})
    monkeypatch.setattr(os, "setpriority", refuse)
    before = nice_of_this_thread()
    in_a_thread(syscalls.lower_priority)
    assert in_a_thread(nice_of_this_thread) == before


def test_without_the_system_call_it_is_nicer_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_SCHED_SETATTR", {})
    before = nice_of_this_thread()

    def twice() -> int:
        syscalls.lower_priority()
        syscalls.lower_priority()  # never past the nicest
        return nice_of_this_thread()

    assert in_a_thread(twice) == min(before + 20, 19)


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
