"""The checks of `vfsd doctor`: what a mount needs on this machine, and what to do about each thing that is missing.

The checks change nothing; only `deep` mounts, in a temporary directory.  They read the machine through `Host`, so that
a test can replace it.  A check that fails itself is reported as a finding.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import vfsd
from protocol import compiled
from protocol.backends.container.podman.address import default_address, start_advice
from protocol.backends.container.podman.spec import PODMAN_DEFAULT
from protocol.journal.directory import has_journal, is_locked, read_journal
from protocol.values import Value
from vfsd.machine import runtime
from vfsd.machine.directories import drop_command, journal_directory, journal_names, journals_directory
from vfsd.machine.interpreter import foreign_protocol, install_command
from vfsd.machine.mountinfo import mounts, unmounting_command, vfsd_mounts
from vfsd.machine.mounts import detach, is_dead
from vfsd.machine.resources import CPU_LATENCY_DEVICE, UDEV_RULE, idle_cpus

KERNEL_MIN: Final = (5, 15)  # for the native engine (vfsd/kernel/engines/native/mounting.py)
KERNEL_MIN_PYFUSE3: Final = (5, 4)
# Features of later kernels; source: Documentation/filesystems/fuse.rst and the history in linux/fuse.h.
KERNEL_FEATURES: Final = (
    ((5, 11), "writes without reading security.capability before each (FUSE_HANDLE_KILLPRIV_V2)"),
    ((6, 2), "O_TMPFILE (FUSE_TMPFILE)"),
)
OPEN_FILES_MIN: Final = 1024
PROCESSES_MIN: Final = 32
REQUEST_TIMEOUT_MIN_S: Final = 60
SOCKET_PATH_MAX: Final = 107  # sun_path without its NUL, unix(7)
NAME_LENGTH_USUAL: Final = 32
JOURNAL_SPACE_MIN_BYTES: Final = 128 << 20
JOURNAL_READ_MAX_BYTES: Final = 256 << 20  # a larger journal is left to `vfsd persisted check`
FUSERMOUNT_MOUNTS_MAX: Final = 1000  # the default of mount_max in /etc/fuse.conf, fusermount3(1)
DEEP_TIMEOUT_S: Final = 20
_PODMAN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `what` is the state of `topic`; `advice` is what to do if it is not `ok`.

    `optional`: vfsd works without it, but more slowly or without a feature.  `repair`: the shell command that repairs
    what is missing, if there is one.
    """

    topic: str
    ok: bool
    optional: bool
    what: str
    advice: str = ""
    repair: str = ""


def _fine(topic: str, what: str, *, optional: bool = True) -> Finding:
    return Finding(topic, ok=True, optional=optional, what=what)


def _problem(topic: str, what: str, advice: str = "", *, optional: bool = True, repair: str = "") -> Finding:
    return Finding(topic, ok=False, optional=optional, what=what, advice=advice, repair=repair)


def repair_command(findings: Sequence[Finding]) -> str:
    """Join the commands that repair what is missing to one; "" if no command repairs any of it."""
    commands = [each.repair for each in findings if each.repair and not (each.ok or each.optional)]
    return " && ".join(dict.fromkeys(commands))


def _finding(topic: str, what: str, *, ok: bool, advice: str, optional: bool = True) -> Finding:
    return Finding(topic, ok=ok, optional=optional, what=what, advice="" if ok else advice)


class LeftContainer(Value):
    """A container with the files of `workspace`, which a daemon left and nothing removes unasked."""

    name: str
    workspace: str


def left_containers(url: str) -> list[LeftContainer]:
    """List the containers with files that earlier daemons of this user left on the Podman service at `url`.  Blocks.

    ImportError without Podman's client; OSError if the service does not answer.
    """
    # Start-up: `vfsd doctor` only, and Podman's client is an optional dependency.
    from protocol.backends.container.podman.ownership import WORKSPACE_LABEL, orphans  # noqa: PLC0415
    from protocol.backends.container.podman.service import PodmanService  # noqa: PLC0415

    with contextlib.closing(PodmanService(url, timeout_s=_PODMAN_TIMEOUT_S)) as service:
        return [LeftContainer(state.name, state.labels[WORKSPACE_LABEL]) for state in orphans(service)]


# Enters a user namespace with mounts of its own, as the command of `vfsd run` does; the exit status is the errno.
_UNSHARE: Final = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(libc.unshare(0x10000000 | 0x00020000) and ctypes.get_errno())
"""


def user_namespace_errno() -> int:
    """Return the errno with which the kernel refuses a user namespace to this process, 0 if it does not."""
    return subprocess.run([sys.executable, "-I", "-S", "-c", _UNSHARE], check=False).returncode


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the checks examine; files are read below `root`."""

    root: str = "/"
    release: str = field(default_factory=lambda: os.uname().release)
    uid: int = field(default_factory=os.geteuid)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    # Imports a module and returns its version.  ImportError if it cannot be imported.
    module_version: Callable[[str], str] = field(default=lambda name: str(importlib.import_module(name).__version__))
    # The hard limit of open files for this process and its children, or RLIM_INFINITY.
    open_files_hard: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    # Lists the containers that dead daemons left on the Podman service at a URL.  ImportError, OSError.
    left_containers: Callable[[str], list[LeftContainer]] = field(default=left_containers)
    user_namespace_errno: Callable[[], int] = field(default=user_namespace_errno)

    def path(self, absolute: str) -> str:
        return os.path.join(self.root, absolute.lstrip("/"))

    def read(self, absolute: str) -> str:
        """Return the text of a file; "" if it is missing or cannot be read."""
        try:
            with open(self.path(absolute), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def as_root(self, command: str) -> str:
        """Return the shell command with which this user runs `command` as root."""
        return command if self.uid == 0 else f"sudo {command}"

    def install(self, debian: str, fedora: str) -> str:
        """Return the command that installs packages of this distribution; "" for an unknown one."""
        for manager, packages in (("apt-get", debian), ("dnf", fedora)):
            if self.which(manager):
                return self.as_root(f"{manager} install -y {packages}")
        return ""

    @property
    def is_container(self) -> bool:
        return any(os.path.exists(self.path(mark)) for mark in ("/run/.containerenv", "/.dockerenv"))

    def which(self, program: str) -> str | None:
        return shutil.which(program, path=self.environ.get("PATH", os.defpath))

    @property
    def kernel(self) -> tuple[int, int] | None:
        numbers = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    @property
    def pyfuse3_error(self) -> ImportError | None:
        """Why pyfuse3 cannot be imported; None if it can."""
        try:
            self.module_version("pyfuse3")
        except ImportError as error:
            return error
        return None


def examine(*, deep: bool = False, host: Host | None = None) -> list[Finding]:
    """Run all checks and return their findings in reading order.  `deep` also mounts a workspace, and unmounts it."""
    examined = host or Host()
    checks = [*_CHECKS, _check_mount] if deep else _CHECKS
    return [finding for check in checks for finding in _run(check, examined)]


def _run(check: Callable[[Host], Iterator[Finding]], host: Host) -> list[Finding]:
    try:
        return list(check(host))
    except (OSError, ValueError) as error:
        topic = check.__name__.removeprefix("_check_").replace("_", " ")
        return [_problem(topic, f"cannot be examined: {error}")]


def _install(debian: str, fedora: str) -> str:
    return f"Debian: sudo apt install {debian}; Fedora: sudo dnf install {fedora}"


# -- requirements of a mount ------------------------------------------------------------------------
def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _check_kernel(host: Host) -> Iterator[Finding]:
    version, name = host.kernel, f"Linux {host.release}"
    if version is None:
        yield _problem("kernel", f"unknown version: {host.release!r}")
        return
    native, fallback = _dotted(KERNEL_MIN), _dotted(KERNEL_MIN_PYFUSE3)
    if version < KERNEL_MIN_PYFUSE3:
        what = f"{name}; vfsd needs {native} or later ({fallback} with the pyfuse3 engine)"
        yield _problem("kernel", what, "boot a later kernel", optional=False)
        return
    if version < KERNEL_MIN:
        what = f"{name}; the native engine needs {native}, so mounts need the pyfuse3 engine"
        advice = f"boot Linux {native} or later, or install pyfuse3"
        yield _finding("kernel", what, ok=host.pyfuse3_error is None, advice=advice, optional=False)
    else:
        yield _fine("kernel", name, optional=False)
    missing = [f"{_dotted(since)}: {feature}" for since, feature in KERNEL_FEATURES if version < since]
    if missing:
        yield _problem("kernel features", f"works, but later kernels add {'; '.join(missing)}", "boot a later kernel")


def _check_device(host: Host) -> Iterator[Finding]:
    in_container = "in a container, start it with --device /dev/fuse"
    try:
        os.close(os.open(host.path("/dev/fuse"), os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        repair = "" if host.is_container else host.as_root("modprobe fuse")
        advice = f"sudo modprobe fuse; {in_container}; without it, `vfsd attach DIR` works"
        yield _problem("/dev/fuse", "missing", advice, optional=False, repair=repair)
    except OSError as error:
        advice = f"{in_container} --cap-add SYS_ADMIN; else: sudo modprobe fuse"
        repair = "" if host.is_container else host.as_root("modprobe fuse")
        if error.errno == errno.EACCES:
            advice = repair = host.as_root("chmod 666 /dev/fuse")
        yield _problem("/dev/fuse", f"cannot be opened: {error.strerror}", advice, optional=False, repair=repair)
    else:
        yield _fine("/dev/fuse", "can be opened", optional=False)


def _check_fusermount3(host: Host) -> Iterator[Finding]:
    is_root = host.uid == 0
    path = host.which("fusermount3")
    if path is None and is_root:
        yield _fine("fusermount3", "missing; root does not need it")
        return
    if path is None:
        repair = host.install("fuse3", "fuse3")
        yield _problem("fusermount3", "missing", _install("fuse3", "fuse3"), optional=False, repair=repair)
        return
    found = os.stat(path)
    if not is_root and not (found.st_mode & stat.S_ISUID and found.st_uid == 0):
        advice = f"sudo chown root {shlex.quote(path)} && sudo chmod 4755 {shlex.quote(path)}"
        what = f"{path} is not setuid root: only root can mount"
        yield _problem("fusermount3", what, advice, optional=False, repair=advice)
    elif not is_root and re.search(r"^NoNewPrivs:\s*1", host.read("/proc/self/status"), re.MULTILINE):
        what = "this process cannot gain privileges (NoNewPrivs), so fusermount3 cannot mount"
        advice = "run vfsd outside of the sandbox; in a systemd unit set NoNewPrivileges=no"
        yield _problem("fusermount3", what, advice, optional=False)
    elif not is_root and not os.path.exists(host.path("/etc/mtab")):
        advice = host.as_root("ln -s /proc/self/mounts /etc/mtab")
        what = "/etc/mtab is missing, which fusermount3 reads: users cannot unmount"
        yield _problem("fusermount3", what, advice, optional=False, repair=advice)
    else:
        yield _fine("fusermount3", path, optional=is_root)


def _check_pyfuse3(host: Host) -> Iterator[Finding]:
    """Check the reference engine, an extra, which is the fallback if the kernel is too old for the native one."""
    error = host.pyfuse3_error
    if error is not None:
        packages = "gcc pkg-config libfuse3-dev python3-dev", "gcc pkgconf-pkg-config fuse3-devel python3-devel"
        install = install_command("pyfuse3")
        advice = f"{_install(*packages)}; then: {install}"
        what = f"cannot be imported ({error}): no --engine pyfuse3; mounts use the native engine"
        compiler = host.install(*packages)
        repair = f"{compiler} && {install}" if compiler else ""
        is_needless = (host.kernel or KERNEL_MIN) >= KERNEL_MIN
        yield _problem("pyfuse3", what, advice, optional=is_needless, repair=repair)
        return
    yield _fine("pyfuse3", f"version {host.module_version('pyfuse3')}")
    # The library that this process loaded; other versions may be installed too.
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        loaded = re.search(r"\S*/libfuse3[^/\s]*\.so\.(\S+)", file.read())
    if loaded:
        yield _fine("libfuse", f"version {loaded[1]} ({loaded[0]})")


def _check_installation(_host: Host) -> Iterator[Finding]:
    build, reason = compiled.build()
    what = f"version {vfsd.__version__} ({build}) in {os.path.dirname(vfsd.__file__)}"
    yield _fine("installation", what, optional=False)
    if reason:
        yield _problem("compiled modules", f"not used: {reason}", "in the checkout: make compiled")
    foreign = foreign_protocol()
    if foreign is not None:
        yield _problem("protocol", *foreign, optional=False)


# Settings with which the kernel refuses user namespaces to users, and the value that allows them: user_namespaces(7),
# and the patches of Ubuntu (since 23.10) and Debian (before 11).
_NAMESPACE_LIMITS: Final = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0", "AppArmor restricts user namespaces (Ubuntu's default)"),
    ("kernel.unprivileged_userns_clone", "0", "1", "the kernel refuses user namespaces to users"),
    ("user.max_user_namespaces", "0", "10000", "the kernel refuses user namespaces"),
)


def _check_user_namespaces(host: Host) -> Iterator[Finding]:
    """Check what a user, but not root, needs for the private mount of `vfsd run`."""
    topic = "user namespaces"
    if host.uid == 0:
        return
    effect = "the command of `vfsd run` sees its overlay at another path than the directory's"
    for name, bad, good, reason in _NAMESPACE_LIMITS:
        if host.read(f"/proc/sys/{name.replace('.', '/')}").strip() == bad:
            advice = f"sudo sysctl {name}={good}; a line in /etc/sysctl.d/60-vfsd.conf keeps that after a boot"
            yield _problem(topic, f"{reason}: {effect}", advice)
            return
    code = host.user_namespace_errno()
    if code:
        what = f"refused ({os.strerror(code)}): {effect}"
        yield _problem(topic, what, "run vfsd outside of the chroot or container, or as root")
    else:
        yield _fine(topic, "allowed")


def _check_allow_other(host: Host) -> Iterator[Finding]:
    topic, file = "user_allow_other", "/etc/fuse.conf"
    if any(line.strip() == topic for line in host.read(file).splitlines()):
        yield _fine(topic, f"set in {file}")
    elif host.uid == 0:
        yield _fine(topic, "not set; root does not need it")
    else:
        yield _problem(
            topic, f"not set in {file}: users cannot pass --allow-other", f"echo {topic} | sudo tee -a {file}"
        )


def _check_runtime_directory(_host: Host) -> Iterator[Finding]:
    topic, directory = "runtime directory", runtime.socket_dir()
    advice = f"set ${runtime.RUNTIME_VARIABLE} to a directory of yours"
    try:
        with tempfile.TemporaryFile(dir=runtime.ensure_socket_dir()):
            pass
    except OSError as error:
        yield _problem(topic, f"{directory}: {error.strerror or error}", advice, optional=False)
        return
    longest = SOCKET_PATH_MAX - len(os.fsencode(directory)) - len("/.sock")
    if longest < NAME_LENGTH_USUAL:
        what = f"{directory} leaves only {max(longest, 0)} characters for a workspace's name in its socket's path"
        yield _problem(topic, what, advice.replace("a directory", "a shorter directory"), optional=longest > 0)
    else:
        yield _fine(topic, directory, optional=False)


# -- limits -----------------------------------------------------------------------------------------
def _check_journals(_host: Host) -> Iterator[Finding]:
    """Check that `--persist` can write its journals, and report what those hold that no daemon uses."""
    directory = journals_directory()
    above = directory
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.access(above, os.W_OK | os.X_OK):
        yield _problem(
            "journals", f"{above} is not writable", "set XDG_STATE_HOME, or use --journal-dir with --persist"
        )
        return
    free = shutil.disk_usage(above).free
    if free < JOURNAL_SPACE_MIN_BYTES:
        yield _problem("journals", f"{free >> 20} MiB free in {above}", "free space: a journal grows with each change")
    kept = []
    for name in journal_names():
        place = journal_directory(name)
        try:
            if has_journal(place) and not is_locked(place):
                if sum(entry.stat().st_size for entry in os.scandir(place)) <= JOURNAL_READ_MAX_BYTES:
                    read_journal(place)
                kept.append(name)
        except OSError as error:
            advice = f"`vfsd persisted check {name}` shows more; `{drop_command(name, place)}` removes it"
            yield _problem("journals", f"{place}: {error.strerror}", advice)
    if kept:
        advice = "`vfsd mount DIR --persist --name NAME` continues one, `vfsd persisted drop NAME` removes one"
        yield _fine("journals", f"kept without a running daemon: {', '.join(kept)} ({advice})")
    else:
        yield _fine("journals", f"{directory} can be written")


def _check_limits(host: Host) -> Iterator[Finding]:
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    advice = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}; in a unit: LimitNOFILE=65536"
    what = "no limit" if unlimited else f"at most {files}"
    yield _finding("open files", what, ok=unlimited or files >= OPEN_FILES_MIN, advice=advice)
    yield _processes(host)
    yield _request_timeout(host)
    if host.uid != 0:
        yield _mounts_of_users(host)


def _processes(host: Host) -> Finding:
    """Check the limit of the control group, which containers and units set; cgroups(7), version 2."""
    own = re.search(r"^0::(.*)$", host.read("/proc/self/cgroup"), re.MULTILINE)
    directory = f"/sys/fs/cgroup{own[1]}" if own else ""
    most, now = host.read(f"{directory}/pids.max").strip(), host.read(f"{directory}/pids.current").strip()
    if not directory or most in {"", "max"} or not now:
        return _fine("processes", "no limit of the control group")
    left = int(most) - int(now)
    advice = "raise TasksMax= of the unit, or --pids-limit of the container"
    return _finding("processes", f"{left} more of {int(most)} allowed", ok=left >= PROCESSES_MIN, advice=advice)


def _check_wakeups(host: Host) -> Iterator[Finding]:
    """Check whether idle CPUs can be kept awake during bursts of requests (`vfsd mount --wakeups`)."""
    found = idle_cpus(host.root)
    if found.why_awake is not None:
        yield _fine("wake-ups", f"{found.describe()}: nothing to gain, {found.why_awake}")
        return
    try:
        os.close(os.open(host.path(CPU_LATENCY_DEVICE), os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        what = f"{found.describe()}; {CPU_LATENCY_DEVICE} is missing, so requests wait for sleeping CPUs"
        yield _problem("wake-ups", what, "in a container, start it with --device /dev/cpu_dma_latency")
    except OSError as error:
        what = (
            f"{found.describe()}; {CPU_LATENCY_DEVICE} cannot be opened ({error.strerror}), so requests wait for"
            " sleeping CPUs and take two to five times as long"
        )
        advice = (
            f"sudo groupadd -f vfsd && sudo usermod -aG vfsd $USER && echo {shlex.quote(UDEV_RULE)} |"
            " sudo tee /etc/udev/rules.d/70-vfsd.rules && sudo udevadm control --reload && sudo udevadm trigger"
            " --name-match=cpu_dma_latency; then log in again"
        )
        yield _problem("wake-ups", what, advice)
    else:
        yield _fine("wake-ups", f"{found.describe()}: mounts keep idle CPUs awake during bursts of requests")


def _request_timeout(host: Host) -> Finding:
    """Check the timeout after which Linux 6.15 and later abort a mount; Documentation/admin-guide/sysctl/fs.rst."""
    values = [host.read(f"/proc/sys/fs/fuse/{name}") for name in ("default_request_timeout", "max_request_timeout")]
    timeouts = [int(value) for value in values if value and int(value) > 0]
    if not timeouts:
        return _fine("request timeout", "none")
    what = f"the kernel aborts a mount if its daemon does not answer for {min(timeouts)} s"
    advice = "sudo sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0"
    return _finding("request timeout", what, ok=min(timeouts) >= REQUEST_TIMEOUT_MIN_S, advice=advice)


def _mounts_of_users(host: Host) -> Finding:
    setting = re.search(r"^mount_max = (\d+)$", host.read("/etc/fuse.conf"), re.MULTILINE)
    most = int(setting[1]) if setting else FUSERMOUNT_MOUNTS_MAX
    now = sum(mount.is_fuse for mount in mounts())
    advice = "raise mount_max in /etc/fuse.conf, or unmount workspaces that are not used: vfsd list"
    return _finding("fuse mounts", f"{now} of {most}", ok=now < most, advice=advice, optional=False)


# -- optional parts ---------------------------------------------------------------------------------
_CONTAINER_RUNTIMES: Final = ("crun", "runc")  # in Podman's order of preference


def _check_podman(host: Host) -> Iterator[Finding]:
    path = host.which("podman")
    if path is None:
        yield _problem("podman", "missing: no container backend", _install("podman", "podman"))
        return
    yield _fine("podman", path)
    if not any(host.which(runtime) for runtime in _CONTAINER_RUNTIMES):
        what = f"none of {', '.join(_CONTAINER_RUNTIMES)}: containers can be created but not started"
        yield _problem("container runtime", what, _install("crun", "crun"))
    service = _podman_service(host)
    yield service
    if service.ok:
        yield from _left_containers(host)
    yield from _podman_limits(host)
    if importlib.util.find_spec("podman") is None:
        yield _problem("podman client", "the Python package is missing", install_command("container"))
    else:
        yield _fine("podman client", f"version {importlib.metadata.version('podman')}")


def _podman_service(host: Host) -> Finding:
    topic = "podman socket"
    try:
        address = default_address(host.environ, host.uid)
    except ValueError as error:
        return _problem(topic, f"$CONTAINER_HOST: {error}", "unset CONTAINER_HOST, or set it to a service's address")
    if address.kind != "unix":
        return _fine(topic, f"$CONTAINER_HOST is {address}, which is not tried here")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect(address.path)
    except OSError as error:
        return _problem(
            topic, f"{address.path}: {error.strerror or error}", start_advice(address, host.environ, host.uid)
        )
    return _fine(topic, address.path)


def _left_containers(host: Host) -> Iterator[Finding]:
    """Find containers with files of workspaces whose daemons died."""
    address = default_address(host.environ, host.uid)
    if address.kind != "unix":
        return
    with contextlib.suppress(ImportError, OSError):  # said by other findings; or Podman does not answer
        for left in host.left_containers(address.url):
            what = f"{left.name} has the files of the workspace {left.workspace}, which its daemon left"
            advice = (
                f"mount {left.workspace} with the same options again, which continues in it; or remove the files:"
                f" podman rm --force --volumes {left.name}"
            )
            yield _problem("containers", what, advice)


_CAP_SYS_RESOURCE: Final = 1 << 24  # linux/capability.h: the right to raise hard limits


def _podman_limits(host: Host) -> Iterator[Finding]:
    """Find limits with which root's Podman cannot start containers: its default limits exceed them.

    Does not apply to users: Podman lowers its defaults itself for them.
    """
    hard = host.open_files_hard
    capabilities = re.search(r"^CapEff:\s*(\w+)", host.read("/proc/self/status"), re.MULTILINE)
    can_raise = capabilities is not None and int(capabilities[1], 16) & _CAP_SYS_RESOURCE
    if host.uid != 0 or can_raise or hard == resource.RLIM_INFINITY or hard >= PODMAN_DEFAULT:
        return
    files = ("/etc/containers/containers.conf", "/usr/share/containers/containers.conf")
    if any(re.search(r"^\s*default_ulimits\s*=", host.read(file), re.MULTILINE) for file in files):
        return
    what = (
        f"the hard limit of {hard} open files is below Podman's default of {PODMAN_DEFAULT} and cannot be raised:"
        " `podman run` fails; containers that vfsd creates get lower limits and start"
    )
    advice = f'in {files[0]}, section [containers]: default_ulimits = ["nofile={hard}:{hard}", "nproc=4096:4096"]'
    yield _problem("podman limits", what, advice)


# -- keepers ----------------------------------------------------------------------------------------
def _check_keepers(_host: Host) -> Iterator[Finding]:
    """Say what restarts the daemons of this user's workspaces, and which of them have lost that."""
    kept = []
    for record in runtime.read_records():
        if record.keeper is None:
            continue
        who = f"process {record.keeper}"
        if not record.is_kept:
            if record.alive:
                what = f"the keeper of {record.name} died: if its daemon dies, programs get ENOTCONN"
                yield _problem("keepers", what, "unmount it and mount it again when no program uses it")
            elif record.failure is not None:
                what = f"the daemon of {record.name} is dead: {record.failure}"
                yield _problem("keepers", what, _mount_again(record))
        elif record.alive and record.lost_keeper is not None:
            why, advice = record.lost_keeper
            what = f"the keeper of {record.name} could not restart its daemon: {why}"
            yield _problem("keepers", what, advice)
        elif record.alive:
            kept.append(f"{record.name}: {who}")
        else:
            what = f"the daemon of {record.name} died, and {who} is to start another one; programs wait for that"
            yield _problem("keepers", what, "its log says more, if this lasts longer than a moment")
    if kept:
        yield _fine("keepers", f"restart a daemon that dies: {', '.join(kept)}")


def _mount_again(record: runtime.WorkspaceRecord) -> str:
    return "mount it again" + (f": {record.continuing(record.journal)}" if record.journal is not None else "")


# -- leftovers --------------------------------------------------------------------------------------
def _check_leftovers(_host: Host) -> Iterator[Finding]:
    """Find what dead daemons left.

    A record is the only note of a journal that --journal-dir names, so the advice is the command that says what it has.
    """
    records = {record.name: record for record in runtime.read_records()}
    found = [*_dead_mounts(records), *_dead_sockets(records)]
    yield from found or [_fine("leftovers", "no dead mount, no dead socket")]


def _dead_mounts(records: Mapping[str, runtime.WorkspaceRecord]) -> Iterator[Finding]:
    for mount in vfsd_mounts():
        if is_dead(mount.mountpoint):
            what = f"{mount.describe()} at {mount.mountpoint} has lost its daemon"
            record = records.get(mount.workspace or "")
            if record is not None and not record.alive and record.mountpoint == mount.mountpoint:
                yield _problem("dead mount", what, f"vfsd unmount {record.name}; or {_mount_again(record)}")
            else:
                detach, path = unmounting_command(mount.mountpoint, lazy=True), shlex.quote(mount.mountpoint)
                yield _problem("dead mount", what, f"{detach}; or mount there again: vfsd mount {path}")


def _dead_sockets(records: Mapping[str, runtime.WorkspaceRecord]) -> Iterator[Finding]:
    alive = {record.name for record in records.values() if record.alive or record.is_kept}
    directory = runtime.socket_dir()
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    dead = {os.path.splitext(name)[0] for name in names if name.endswith((".sock", ".json")) and name[0] != "."}
    for name in sorted(dead - alive):
        what = f"workspace {name!r} ended without removing its socket or record"
        if (record := records.get(name)) is not None:
            if not is_dead(record.mountpoint):  # otherwise it was named as a dead mount
                yield _problem("dead socket", what, f"vfsd unmount {name}; or {_mount_again(record)}")
        else:
            files = [os.path.join(directory, name + suffix) for suffix in (".sock", ".json") if name + suffix in names]
            yield _problem("dead socket", what, "rm -f " + shlex.join(files))


# -- deep -------------------------------------------------------------------------------------------
# Runs in a child process, so that a mount that hangs can be abandoned.  Writes a file, because some sandboxes allow
# mount(2) but never deliver a request.
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
    with tempfile.TemporaryDirectory(prefix="vfsd-doctor-") as directory:
        try:
            command = [sys.executable, "-c", _MOUNT, directory]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEEP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                detach(directory, lazy=True)
            yield _problem("mount", f"not finished after {DEEP_TIMEOUT_S} s", optional=False)
            return
    if done.returncode == 0:
        yield _fine("mount", "mounted, wrote a file, and unmounted", optional=False)
    else:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = "; ".join(line for line in lines if not line.startswith((" ", "Traceback"))) or "no reason"
        advice = "see the lines above; in a container: --device /dev/fuse --cap-add SYS_ADMIN"
        yield _problem("mount", reason, advice, optional=False)


_CHECKS: Final = [
    _check_installation,
    _check_kernel,
    _check_device,
    _check_fusermount3,
    _check_pyfuse3,
    _check_user_namespaces,
    _check_allow_other,
    _check_runtime_directory,
    _check_journals,
    _check_limits,
    _check_wakeups,
    _check_podman,
    _check_keepers,
    _check_leftovers,
]
