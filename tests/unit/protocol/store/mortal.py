"""A process that does one thing with a store and is killed at the n-th system call of it; for test_killed.

It reads a line of JSON, forks a child that does what it says, and answers with how the child ended: the tests' own
process has threads, from which nobody should fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from protocol.store import DirectorySource, DirectoryTarget, RestoreRequest, Store

_WATCHED = frozenset({"posix", "fcntl"})
_NO_SYSTEM_CALLS = frozenset({"fspath", "makedev"})


def work(order: dict[str, Any]) -> None:
    with Store(order["store"]) as store:
        if order["do"] == "take":
            store.take("w", order["name"], DirectorySource(order["root"]))
        elif order["do"] == "restore":
            store.restore("w", DirectoryTarget(order["root"]), RestoreRequest(order["name"], safety=order["safety"]))
        else:
            store.collect_garbage()


def watched(at: int, body: Callable[[], None]) -> int:
    """How many system calls `body` made; dies at the `at`-th, before or after it."""
    count = 0

    def hook(frame: object, event: str, function: Any) -> None:
        nonlocal count
        is_watched = getattr(function, "__module__", "") in _WATCHED and function.__name__ not in _NO_SYSTEM_CALLS
        if event in {"c_call", "c_return"} and is_watched:
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(hook)
    try:
        body()
    finally:
        sys.setprofile(None)
    return count


def child(order: dict[str, Any], answer: int) -> None:
    try:
        count = watched(order.get("at", 0), lambda: work(order))
        os.write(answer, b"%d" % count)
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode() + b"\n")
        os._exit(1)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            child(order, write)
        os.close(write)
        if "after_s" in order:
            time.sleep(order["after_s"])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        calls = int(os.read(read, 100) or 0)
        os.close(read)
        print(json.dumps({"killed": os.WIFSIGNALED(status), "failed": status == 256, "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
