"""The properties of a process that a forked process cannot take over from another one.

A mount compares its own with those of the fork server, and starts its daemon directly if one differs.

Source: namespaces(7), cgroups(7), proc_pid_status(5), getrlimit(2), sched(7).
"""

from __future__ import annotations

import os
import resource
import sys
import zlib
from collections.abc import Mapping
from typing import Final

import vfsd

_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_STATUS_FIELDS: Final = {
    "Uid": "user",
    "Gid": "group",
    "Groups": "supplementary groups",
    "NoNewPrivs": "no_new_privs flag",
    "Seccomp": "seccomp mode",
    "CapInh": "inheritable capabilities",
    "CapPrm": "permitted capabilities",
    "CapEff": "effective capabilities",
    "CapBnd": "capability bounding set",
    "CapAmb": "ambient capabilities",
}
# The dynamic linker, the C library and the interpreter read these before the first line of a program.
_VARIABLES: Final = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "COVERAGE", "COV_")
_INTERPRETER: Final = "environment of the interpreter"
_INSTALLATION: Final = "installation"
RESOURCES: Final = tuple(sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")))


def process_properties(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of the calling thread, by name.  `environment` is that of the daemon."""
    found = {f"{name} namespace": _link(f"/proc/thread-self/ns/{name}") for name in _NAMESPACES}
    status = dict(line.partition(":")[::2] for line in _text("/proc/thread-self/status").splitlines())
    found |= {name: status.get(field, "").strip() for field, name in _STATUS_FIELDS.items()}
    root = os.stat("/")
    return found | {
        "cgroup": _text("/proc/thread-self/cgroup"),
        "security label": _text("/proc/thread-self/attr/current"),
        "root directory": f"{root.st_dev}:{root.st_ino}",
        "hard limits": " ".join(str(resource.getrlimit(each)[1]) for each in RESOURCES),
        "nice value": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "scheduling policy": str(os.sched_getscheduler(0)),
        _INSTALLATION: f"{vfsd.__version__} {vfsd.__file__} {sys.executable} {sys.prefix} {sys.version}",
        _INTERPRETER: "\n".join(
            f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(_VARIABLES)
        ),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the name of the first property that differs, or None."""
    return next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)


def interpreter_key(properties: Mapping[str, str]) -> str:
    """Return eight hexadecimal digits for the interpreter and its variables: each kind has a fork server of its own.

    Two kinds may have the same key; their servers refuse each other's mounts.
    """
    kind = "\0".join(properties[name] for name in (_INSTALLATION, _INTERPRETER))
    return f"{zlib.crc32(kind.encode('utf-8', 'surrogateescape')):08x}"


def is_in_private_mounts() -> bool:
    """Return whether this process is in a mount namespace that is not that of process 1.

    A process that stays in such a namespace keeps the mounts in it alive.
    """
    own = _link("/proc/thread-self/ns/mnt")
    first = _link("/proc/1/ns/mnt")
    if first:
        return first != own
    # Only a privileged process may read the link of process 1.  Others need a user namespace for one of their own.
    return _text("/proc/thread-self/uid_map").split() != ["0", "0", "4294967295"]


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def current_umask() -> int:
    """Return the umask of this thread, without changing it for the others as umask(2) would."""
    with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
