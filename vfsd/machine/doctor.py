"""What `vfsd doctor` looks at: is everything there that a mount needs, and what to type where it is not.

Only looks: nothing is mounted (but for `deep`), changed or sent anywhere.  A check that itself fails is a
finding.  What a check reads of the machine it reads through `Host`, so that a test can show it another one.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import vfsd
from protocol.backends.container.podman.address import default_address
from protocol.backends.container.podman.ulimits import PODMAN_DEFAULT
from vfsd.machine import runtime
from vfsd.machine.foreign import foreign_protocol
from vfsd.machine.mountinfo import mounts, vfsd_mounts
from vfsd.machine.mounts import is_dead

__all__ = ["Finding", "Host", "examine"]

KERNEL_MIN: Final = (5, 15)  # of the native engine (vfsd/kernel/engines/native/negotiation.py)
KERNEL_MIN_PYFUSE3: Final = (5, 4)
# What later kernels do better; Documentation/filesystems/fuse.rst and the history in linux/fuse.h.
KERNEL_FEATURES: Final = (
    ((5, 11), "writes without a look at security.capability before each (FUSE_HANDLE_KILLPRIV_V2)"),
    ((6, 2), "O_TMPFILE (FUSE_TMPFILE)"),
)
OPEN_FILES_MIN: Final = 1024
PROCESSES_MIN: Final = 32
REQUEST_TIMEOUT_MIN_S: Final = 60
SOCKET_PATH_MAX: Final = 107  # sun_path less its NUL, unix(7)
NAME_LENGTH_USUAL: Final = 32
FUSERMOUNT_MOUNTS_MAX: Final = 1000  # fusermount3(1), without mount_max in /etc/fuse.conf
DEEP_TIMEOUT_S: Final = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is the case with `topic`; where that is not `ok`, `advice` is what to do.

    `optional`: vfsd works without it, less well or without a part.
    """

    topic: str
    ok: bool
    optional: bool
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as the checks see it; files are looked up below `root`."""

    root: str = "/"
    release: str = field(default_factory=lambda: os.uname().release)
    uid: int = field(default_factory=os.geteuid)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    # The version of a module that is imported.  ImportError where it cannot be.
    module_version: Callable[[str], str] = field(default=lambda name: str(importlib.import_module(name).__version__))
    # Of open files, for this process and for what it starts; RLIM_INFINITY for none.
    open_files_hard: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])

    def path(self, absolute: str) -> str:
        return os.path.join(self.root, absolute.lstrip("/"))

    def read(self, absolute: str) -> str | None:
        """The text of a file; None where it is missing or may not be read."""
        try:
            with open(self.path(absolute), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.environ.get("PATH", os.defpath))


def examine(*, deep: bool = False, host: Host | None = None) -> list[Finding]:
    """All findings, in the order to read them.  `deep` also makes a mount in a temporary directory."""
    looked_at = host or Host()
    checks = [*_CHECKS, _check_mount] if deep else _CHECKS
    return [finding for check in checks for finding in _run(check, looked_at)]


def _run(check: Callable[[Host], Iterator[Finding]], host: Host) -> list[Finding]:
    try:
        return list(check(host))
    except (OSError, ValueError) as error:
        topic = check.__name__.removeprefix("_check_").replace("_", " ")
        return [Finding(topic, ok=False, optional=True, what=f"cannot be examined: {error}")]


def _install(debian: str, fedora: str) -> str:
    return f"Debian: sudo apt install {debian}; Fedora: sudo dnf install {fedora}"


# -- what a mount needs -----------------------------------------------------------------------------
def _numbers(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _kernel(host: Host) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", host.release)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _import_error(host: Host) -> ImportError | None:
    """Why pyfuse3 cannot be imported; None where it can."""
    try:
        host.module_version("pyfuse3")
    except ImportError as error:
        return error
    return None


def _check_kernel(host: Host) -> Iterator[Finding]:
    version = _kernel(host)
    if version is None:
        yield Finding("kernel", ok=False, optional=True, what=f"a version that is no version: {host.release!r}")
        return
    native, other = _numbers(KERNEL_MIN), _numbers(KERNEL_MIN_PYFUSE3)
    if version < KERNEL_MIN_PYFUSE3:
        what = f"Linux {host.release}; vfsd needs {native} or later ({other} with the pyfuse3 engine)"
        yield Finding("kernel", ok=False, optional=False, what=what, advice="boot a later kernel")
        return
    if version < KERNEL_MIN:
        what = f"Linux {host.release}; the native engine needs {native}, so mounts need the pyfuse3 engine"
        missing = _import_error(host) is not None
        advice = f"boot Linux {native} or later, or install pyfuse3" if missing else ""
        yield Finding("kernel", ok=not missing, optional=False, what=what, advice=advice)
    else:
        yield Finding("kernel", ok=True, optional=False, what=f"Linux {host.release}")
    missing_features = [f"{_numbers(since)}: {what}" for since, what in KERNEL_FEATURES if version < since]
    if missing_features:
        what = "works, but a later kernel has " + "; ".join(missing_features)
        yield Finding("kernel features", ok=False, optional=True, what=what, advice="boot a later kernel")


def _check_device(host: Host) -> Iterator[Finding]:
    path = host.path("/dev/fuse")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        advice = "sudo modprobe fuse; in a container, start that with --device /dev/fuse"
        yield Finding("/dev/fuse", ok=False, optional=False, what="missing", advice=advice)
    except OSError as error:
        advice = (
            "sudo chmod 666 /dev/fuse"
            if error.errno == errno.EACCES
            else "in a container, start that with --device /dev/fuse --cap-add SYS_ADMIN; else: sudo modprobe fuse"
        )
        yield Finding("/dev/fuse", ok=False, optional=False, what=f"cannot be opened: {error.strerror}", advice=advice)
    else:
        yield Finding("/dev/fuse", ok=True, optional=False, what="can be opened")


def _check_fusermount3(host: Host) -> Iterator[Finding]:
    is_root = host.uid == 0  # root mounts by itself, and unmounts with umount where need be
    path = host.which("fusermount3")
    if path is None:
        yield Finding("fusermount3", ok=False, optional=is_root, what="missing", advice=_install("fuse3", "fuse3"))
        return
    found = os.stat(path)
    if not is_root and not (found.st_mode & stat.S_ISUID and found.st_uid == 0):
        advice = f"sudo chown root {shlex.quote(path)} && sudo chmod 4755 {shlex.quote(path)}"
        what = f"{path} is not setuid root: only root can mount"
        yield Finding("fusermount3", ok=False, optional=False, what=what, advice=advice)
    elif not is_root and re.search(r"^NoNewPrivs:\s*1", host.read("/proc/self/status") or "", re.MULTILINE):
        advice = "run vfsd outside, or in a systemd unit set NoNewPrivileges=no"
        what = "this process may not gain privileges (NoNewPrivs), so it cannot mount for us"
        yield Finding("fusermount3", ok=False, optional=False, what=what, advice=advice)
    else:
        yield Finding("fusermount3", ok=True, optional=is_root, what=path)


def _check_pyfuse3(host: Host) -> Iterator[Finding]:
    """The reference engine, and the fallback where the kernel is too old for the native one."""
    error = _import_error(host)
    if error is not None:
        headers = _install(
            "gcc pkg-config libfuse3-dev python3-dev", "gcc pkgconf-pkg-config fuse3-devel python3-devel"
        )
        advice = f"{headers}; then: {shlex.quote(sys.executable)} -m pip install pyfuse3"
        what = f"cannot be imported ({error}): no --engine pyfuse3; mounts use the native engine"
        optional = (_kernel(host) or KERNEL_MIN) >= KERNEL_MIN
        yield Finding("pyfuse3", ok=False, optional=optional, what=what, advice=advice)
        return
    yield Finding("pyfuse3", ok=True, optional=True, what=f"version {host.module_version('pyfuse3')}")
    # The library that was really loaded, whatever else is installed.
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        loaded = re.search(r"\S*/libfuse3[^/\s]*\.so\.(\S+)", file.read())
    if loaded:
        yield Finding("libfuse", ok=True, optional=True, what=f"version {loaded[1]} ({loaded[0]})")


def _check_installation(_host: Host) -> Iterator[Finding]:
    what = f"version {vfsd.__version__} in {os.path.dirname(vfsd.__file__)}"
    yield Finding("installation", ok=True, optional=False, what=what)
    foreign = foreign_protocol()
    if foreign is not None:
        what, _, advice = foreign.partition(": ")
        yield Finding("protocol", ok=False, optional=False, what=what, advice=advice)


def _check_allow_other(host: Host) -> Iterator[Finding]:
    lines = (host.read("/etc/fuse.conf") or "").splitlines()
    if any(line.strip() == "user_allow_other" for line in lines):
        yield Finding("user_allow_other", ok=True, optional=True, what="set in /etc/fuse.conf")
    elif host.uid == 0:
        yield Finding("user_allow_other", ok=True, optional=True, what="not set, and not needed by root")
    else:
        advice = "echo user_allow_other | sudo tee -a /etc/fuse.conf"
        what = "not set in /etc/fuse.conf: no --allow-other for users"
        yield Finding("user_allow_other", ok=False, optional=True, what=what, advice=advice)


def _check_runtime_directory(_host: Host) -> Iterator[Finding]:
    place = runtime.socket_dir()
    advice = f"set ${runtime.RUNTIME_VARIABLE} to a directory of yours"
    try:
        with tempfile.TemporaryFile(dir=runtime.ensure_socket_dir()):
            pass
    except OSError as error:
        what = f"{place}: {error.strerror or error}"
        yield Finding("runtime directory", ok=False, optional=False, what=what, advice=advice)
        return
    longest = SOCKET_PATH_MAX - len(os.fsencode(place)) - len("/.sock")
    if longest < NAME_LENGTH_USUAL:
        what = f"{place} leaves only {max(longest, 0)} characters for a workspace's name in the path of its socket"
        short = advice.replace("a directory", "a shorter directory")
        yield Finding("runtime directory", ok=False, optional=longest > 0, what=what, advice=short)
    else:
        yield Finding("runtime directory", ok=True, optional=False, what=place)


# -- limits -----------------------------------------------------------------------------------------
def _check_limits(host: Host) -> Iterator[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= OPEN_FILES_MIN
    advice = "" if enough else f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}; in a unit: LimitNOFILE=65536"
    yield Finding("open files", ok=enough, optional=True, what=_limit(files), advice=advice)
    yield from _processes(host)
    yield from _request_timeout(host)
    yield from _mounts_of_users(host)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"at most {value}"


def _processes(host: Host) -> Iterator[Finding]:
    """The control group's limit, which containers and units have; cgroups(7), version 2."""
    own = re.search(r"^0::(.*)$", host.read("/proc/self/cgroup") or "", re.MULTILINE)
    directory = f"/sys/fs/cgroup{own[1]}" if own else ""
    most, now = host.read(f"{directory}/pids.max"), host.read(f"{directory}/pids.current")
    if not directory or most is None or now is None or most.strip() == "max":
        yield Finding("processes", ok=True, optional=True, what="no limit of the control group")
        return
    left = int(most) - int(now)
    advice = "" if left >= PROCESSES_MIN else "raise TasksMax= of the unit, or --pids-limit of the container"
    yield Finding("processes", ok=not advice, optional=True, what=f"{left} more of {int(most)} allowed", advice=advice)


def _request_timeout(host: Host) -> Iterator[Finding]:
    """Since Linux 6.15 a mount is aborted whose daemon takes longer; Documentation/admin-guide/sysctl/fs.rst."""
    values = [host.read(f"/proc/sys/fs/fuse/{name}") for name in ("default_request_timeout", "max_request_timeout")]
    timeouts = [int(value) for value in values if value is not None and int(value) > 0]
    if not timeouts:
        yield Finding("request timeout", ok=True, optional=True, what="none")
        return
    enough = min(timeouts) >= REQUEST_TIMEOUT_MIN_S
    advice = "" if enough else "sudo sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0"
    what = f"the kernel aborts a mount whose daemon does not answer for {min(timeouts)} s"
    yield Finding("request timeout", ok=enough, optional=True, what=what, advice=advice)


def _mounts_of_users(host: Host) -> Iterator[Finding]:
    if host.uid == 0:
        return
    setting = re.search(r"^mount_max = (\d+)$", host.read("/etc/fuse.conf") or "", re.MULTILINE)
    most = int(setting[1]) if setting else FUSERMOUNT_MOUNTS_MAX
    now = sum(mount.is_fuse for mount in mounts())
    advice = "" if now < most else "raise mount_max in /etc/fuse.conf, or unmount what is not used: vfsd list"
    yield Finding("fuse mounts", ok=not advice, optional=False, what=f"{now} of {most}", advice=advice)


# -- what can be had besides ------------------------------------------------------------------------
_CONTAINER_RUNTIMES: Final = ("crun", "runc")  # what Podman starts containers with, by its own preference


def _check_podman(host: Host) -> Iterator[Finding]:
    path = host.which("podman")
    if path is None:
        what = "missing: no container backend"
        yield Finding("podman", ok=False, optional=True, what=what, advice=_install("podman", "podman"))
        return
    yield Finding("podman", ok=True, optional=True, what=path)
    if not any(host.which(runtime) for runtime in _CONTAINER_RUNTIMES):
        what = f"none of {', '.join(_CONTAINER_RUNTIMES)}: containers are made, but do not start"
        yield Finding("container runtime", ok=False, optional=True, what=what, advice=_install("crun", "crun"))
    yield from _podman_service(host)
    yield from _podman_limits(host)
    if importlib.util.find_spec("podman") is None:
        advice = f"{shlex.quote(sys.executable)} -m pip install 'vfsd[container]'"
        yield Finding("podman client", ok=False, optional=True, what="the Python package is missing", advice=advice)
    else:
        what = f"version {importlib.metadata.version('podman')}"
        yield Finding("podman client", ok=True, optional=True, what=what)


def _podman_service(host: Host) -> Iterator[Finding]:
    try:
        address = default_address(host.environ, host.uid)
    except ValueError as error:
        advice = "unset CONTAINER_HOST, or name a service"
        yield Finding("podman socket", ok=False, optional=True, what=f"$CONTAINER_HOST: {error}", advice=advice)
        return
    if address.kind != "unix":
        what = f"$CONTAINER_HOST is {address}, which is not tried here"
        yield Finding("podman socket", ok=True, optional=True, what=what)
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect(address.path)
    except OSError as error:
        advice = f"systemctl {'' if host.uid == 0 else '--user '}enable --now podman.socket"
        what = f"{address.path}: {error.strerror or error}"
        yield Finding("podman socket", ok=False, optional=True, what=what, advice=advice)
    else:
        yield Finding("podman socket", ok=True, optional=True, what=address.path)


_CAP_SYS_RESOURCE: Final = 1 << 24  # linux/capability.h: may raise hard limits


def _podman_limits(host: Host) -> Iterator[Finding]:
    """Podman of root's starts no container where its default limits can neither be set nor are configured lower."""
    hard = host.open_files_hard
    capabilities = re.search(r"^CapEff:\s*(\w+)", host.read("/proc/self/status") or "", re.MULTILINE)
    may_raise = bool(capabilities) and int(capabilities[1], 16) & _CAP_SYS_RESOURCE  # type: ignore[index]
    if host.uid != 0 or may_raise or hard == resource.RLIM_INFINITY or hard >= PODMAN_DEFAULT:
        return
    files = ("/etc/containers/containers.conf", "/usr/share/containers/containers.conf")
    if any(re.search(r"^\s*default_ulimits\s*=", host.read(file) or "", re.MULTILINE) for file in files):
        return
    what = (
        f"the hard limit of {hard} open files is below Podman's default of {PODMAN_DEFAULT} and cannot be raised:"
        " `podman run` fails; containers that vfsd makes get lower limits and start"
    )
    advice = f'in {files[0]}, section [containers]: default_ulimits = ["nofile={hard}:{hard}", "nproc=4096:4096"]'
    yield Finding("podman limits", ok=False, optional=True, what=what, advice=advice)


# -- what is left of the dead -----------------------------------------------------------------------
def _check_leftovers(_host: Host) -> Iterator[Finding]:
    found = [*_dead_mounts(), *_dead_sockets()]
    yield from found or [Finding("leftovers", ok=True, optional=True, what="no dead mount, no dead socket")]


def _dead_mounts() -> Iterator[Finding]:
    for mount in vfsd_mounts():
        if is_dead(mount.mountpoint):
            place = shlex.quote(mount.mountpoint)
            advice = f"fusermount3 -u -z {place}; or mount there again: vfsd mount {place}"
            what = f"{mount.describe()} at {mount.mountpoint} has lost its daemon"
            yield Finding("dead mount", ok=False, optional=True, what=what, advice=advice)


def _dead_sockets() -> Iterator[Finding]:
    alive = {record.name for record in runtime.read_records() if record.alive}
    directory = runtime.socket_dir()
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    dead = {os.path.splitext(name)[0] for name in names if name.endswith((".sock", ".json")) and name[0] != "."}
    for name in sorted(dead - alive):
        files = [os.path.join(directory, name + suffix) for suffix in (".sock", ".json") if name + suffix in names]
        what = f"workspace {name!r} ended without removing its socket or record"
        yield Finding("dead socket", ok=False, optional=True, what=what, advice="rm -f " + shlex.join(files))


# -- deep -------------------------------------------------------------------------------------------
# In a process of its own, so that a mount that hangs can be given up.  Some sandboxes let one mount but never deliver
# a request, so a file is written.
_MOUNT: Final = """
import os, sys
from protocol import InMemoryFilesystem
from vfsd import Workspace

place, content, files = sys.argv[1], os.urandom(16).hex(), InMemoryFilesystem()
with Workspace.mount(place, filesystem=files, name="doctor"):
    with open(os.path.join(place, "probe"), "w") as file:
        file.write(content)
sys.exit(0 if files.read("probe").content == content else "mounted, but what was written did not reach the daemon")
"""


def _check_mount(_host: Host) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="vfsd-doctor-") as place:
        try:
            command = [sys.executable, "-c", _MOUNT, place]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEEP_TIMEOUT_S, check=False
            )
            said = done.stderr.decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            subprocess.run(["fusermount3", "-u", "-z", place], capture_output=True, check=False)
            yield Finding("mount", ok=False, optional=False, what=f"not done within {DEEP_TIMEOUT_S} s")
            return
    if done.returncode == 0:
        yield Finding("mount", ok=True, optional=False, what="made, a file written in it, and unmounted")
    else:
        reason = "; ".join(line for line in said.splitlines() if not line.startswith((" ", "Traceback"))) or "no reason"
        advice = "see the lines above; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
        yield Finding("mount", ok=False, optional=False, what=reason, advice=advice)


_CHECKS: Final = [
    _check_installation,
    _check_kernel,
    _check_device,
    _check_fusermount3,
    _check_pyfuse3,
    _check_allow_other,
    _check_runtime_directory,
    _check_limits,
    _check_podman,
    _check_leftovers,
]
