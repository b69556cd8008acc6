"""A plain user with subordinate ids, and a rootless Podman service of this user's, in a mount namespace of their own.

The namespace's mounts are shared, as systemd makes them, and everybody may open its /dev/fuse, as udev allows.  The
machine's own mounts do not change.  At the end all processes of the user are killed, and the user is removed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.container.service import NoPodmanError, configuration

PACKAGES = {"newuidmap": "uidmap", "useradd": "passwd", "setpriv": "util-linux"}
_START_S = 60.0
_NAMESPACE = """
mount --make-rshared /
mkdir "$0/dev"
mount -t tmpfs none "$0/dev"
mknod -m 666 "$0/dev/fuse" c 10 229
mount --bind "$0/dev/fuse" /dev/fuse
echo ready
exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class Rootless:
    """The user `name`, whose service listens at `url`.  `home` is the user's directory."""

    name: str
    uid: int
    home: Path
    url: str
    enter: Sequence[str]

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program as the user; CalledProcessError shows what it printed."""
        command = [*self.enter, *self._as_user(), *argv]
        done = subprocess.run(
            command, cwd=self.home, env=self.environment, text=True, check=False, timeout=120,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        assert not check or done.returncode == 0, (argv, done)
        return done

    def vfsd(self, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `vfsd` as the user, with these variables added to the user's environment."""
        # The interpreter may lie in a directory that only root may search.
        readable = ["setpriv", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"]
        command = [*self.enter, *readable, *self._ids(), sys.executable, "-m", "vfsd.cli.main", *arguments]
        done = subprocess.run(
            command, cwd=self.home, env={**self.environment, **environment}, text=True, check=False, timeout=120,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        assert not check or done.returncode == 0, (arguments, done)
        return done

    def _ids(self) -> list[str]:
        return [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]

    def _as_user(self) -> list[str]:
        return ["setpriv", *self._ids(), "--inh-caps=-all"]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "XDG_RUNTIME_DIR": f"{self.home}/run",
            "VFSD_RUNTIME_DIR": f"{self.home}/run", "CONTAINERS_CONF": f"{self.home}/containers.conf",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip


@contextlib.contextmanager
def rootless_podman() -> Iterator[Rootless]:
    """NoPodmanError where a plain user cannot run Podman."""
    for program, package in (("podman", "podman"), *PACKAGES.items()):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            raise NoPodmanError(f"{program} is missing: install {package}")
    # Not in TMPDIR: its path is private to root, and Podman wants at most 50 characters for its run directory.
    home = Path(tempfile.mkdtemp(prefix="vfsd-rootless-", dir="/tmp"))
    name = f"vfsdt{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, home)
        _retried(["useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh", name])
        stack.callback(_retried, ["userdel", name])
        uid = pwd.getpwnam(name).pw_uid
        os.chown(home, uid, uid)
        (home / "run").mkdir(mode=0o700)
        os.chown(home / "run", uid, uid)
        (home / "containers.conf").write_text(configuration())
        namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-ec", _NAMESPACE, home],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(_end, namespace)
        assert namespace.stdout is not None
        if namespace.stdout.readline() != b"ready\n":
            raise NoPodmanError("no mount namespace can be made here")
        enter = ["nsenter", f"--mount=/proc/{namespace.pid}/ns/mnt", f"--wdns={home}"]
        user = Rootless(name, uid, home, f"unix://{home}/podman.sock", enter)
        stack.callback(_kill_all, user)
        _start_service(user, stack)
        yield user


def _start_service(user: Rootless, stack: contextlib.ExitStack) -> None:
    storage = [f"--root={user.home}/storage", f"--runroot={user.home}/runroot", f"--tmpdir={user.home}/tmp"]
    log = user.home / "service.log"
    with log.open("wb") as file:
        service = subprocess.Popen(
            [*user.enter, *user._as_user(), "podman", *storage, "system", "service", "--time=0", user.url],
            env=user.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    stack.callback(_end, service)
    deadline_s = time.monotonic() + _START_S
    while user.run("podman", "--url", user.url, "version", check=False).returncode:
        if service.poll() is not None or time.monotonic() > deadline_s:
            raise NoPodmanError(log.read_text(errors="replace")[-1000:])


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.terminate()


def _kill_all(user: Rootless) -> None:
    """Kill what the user runs, also under subordinate ids, until nothing runs."""
    ids = {user.uid}
    for line in Path("/etc/subuid").read_text().splitlines():
        owner, first, count = line.split(":")
        if owner == user.name:
            ids |= set(range(int(first), int(first) + int(count)))
    while running := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _owner(pid) in ids]:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _owner(pid: int) -> int | None:
    """The real user of a process; None where it has ended."""
    with contextlib.suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return None if fields["State"].strip()[0] in "ZX" else int(fields["Uid"].split()[0])
    return None


def _retried(command: list[str]) -> None:
    """useradd(8) and userdel(8) fail while another one holds the lock of /etc/passwd."""
    deadline_s = time.monotonic() + 30
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    while (done := subprocess.run(command, env=environment, check=False, capture_output=True)).returncode:
        if done.returncode not in {1, 8, 10} or time.monotonic() > deadline_s:
            raise NoPodmanError(done.stderr.decode(errors="replace"))
        time.sleep(0.1)
