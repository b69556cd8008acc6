"""Credentials of object stores in the environment of a long-lived process: hide them from the programs that it starts.

A daemon needs them for the helper that reads an object store, and for the command of `exec:COMMAND`.  Every other
program gets an environment without them: commands of the workspace, git, ssh.  A small leaf, because the daemon and the
backends need it, which import nothing of each other.

Threading: `hide` is called before the process has other threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

# Of the variables of S3, Azure and Google Cloud, not only those that are secret: a session belongs together.
_PREFIXES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_hidden: Final[dict[str, str]] = {}


def hide() -> None:
    """Take the credentials out of `os.environ`, and overwrite them in /proc/PID/environ.

    The processes that this one forks have them, too.
    """
    _hidden.update({name: os.environ[name] for name in os.environ if name.startswith(_PREFIXES)})
    scrub()
    for name in _hidden:
        os.environ.pop(name, None)


def scrub() -> None:
    """Overwrite the credentials in /proc/PID/environ.  `os.environ`, and getenv(3), still have them.

    proc_pid_environ(5): the file shows the memory in which execve(2) put the variables.  Programs of the same user can
    read it.
    """
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES):
            os.environ[name] = value  # a copy in other memory, which getenv(3) returns from now on
    with open("/proc/self/stat", "rb") as file:
        # proc_pid_stat(5): "pid (comm) state ...", env_start and env_end are the fields 50 and 51.
        start, end = map(int, file.read().rpartition(b")")[2].split()[47:49])
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        name_bytes, _, value_bytes = variable.partition(b"=")
        if os.fsdecode(name_bytes).startswith(_PREFIXES):
            ctypes.memset(start + len(name_bytes) + 1, 0, len(value_bytes))
        start += len(variable) + 1


def hidden() -> dict[str, str]:
    """Return the credentials, for a process that continues the work of this one and has no other way to get them."""
    return dict(_hidden)


def take(given: Mapping[str, str]) -> None:
    """Use the credentials that `hidden` returned in another process."""
    _hidden.update(given)


def environment() -> dict[str, str]:
    """Return the environment of this process with the credentials, for a program that needs them."""
    return {**os.environ, **_hidden}
