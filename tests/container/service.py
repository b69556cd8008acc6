"""A Podman service of one's own, on a storage of its own: for the tests and the benchmarks."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.leaks import mounts

SERVICE_TIMEOUT_S = 60.0
# File locks: Podman's usual ones are in shared memory, which all of this user's Podmans have in common.
_CONFIGURATION = """
[containers]
{ulimits}
[engine]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
"""
# Below Podman's own defaults, which cannot be set where it may not raise its limits.
_ULIMITS = 'default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]'
_HTTP_REGISTRY = """
[[registry]]
location = "{registry}"
insecure = true
"""


class NoPodmanError(Exception):
    """Why no service can be run here."""


def _file_system_of(path: Path) -> str:
    places = [mount for mount in mounts() if path.is_relative_to(mount.mountpoint)]
    return max(places, key=lambda mount: len(mount.mountpoint)).fs_type


def _command(place: Path) -> list[str]:
    """Podman on a storage of its own."""
    driver = "vfs" if _file_system_of(place) == "overlay" else "overlay"  # no overlay can be laid over an overlay
    options = [f"--root={place}/storage", f"--runroot={place}/run", f"--tmpdir={place}/tmp"]
    # Else each Podman, those that clean up after a container too, mounts the storage on itself, and unmounts it.
    bare = ["--storage-opt=overlay.skip_mount_home=true"] if driver == "overlay" else []
    return ["podman", *options, f"--storage-driver={driver}", *bare]


def configuration(*, default_ulimits: bool = False) -> str:
    """The text of containers.conf(5)."""
    runtime = "runc" if shutil.which("runc") else "crun"
    return _CONFIGURATION.format(runtime=runtime, ulimits="" if default_ulimits else _ULIMITS)


@contextmanager
def running_service(place: Path, *, default_ulimits: bool = False, http_registry: str = "") -> Iterator[str]:
    """A Podman service on a storage below `place`; its URL.  On leaving, its containers must be gone.

    With `default_ulimits` its containers get Podman's own default limits.  It pulls from `http_registry` (HOST:PORT)
    without TLS.

    NoPodmanError where there can be none.
    """
    if shutil.which("podman") is None:
        raise NoPodmanError("podman is missing")
    place.mkdir()
    (place / "containers.conf").write_text(configuration(default_ulimits=default_ulimits))
    environment = {**os.environ, "CONTAINERS_CONF": str(place / "containers.conf")}
    if http_registry:
        environment["CONTAINERS_REGISTRIES_CONF"] = str(place / "registries.conf")
        (place / "registries.conf").write_text(_HTTP_REGISTRY.format(registry=http_registry))
    url, log = f"unix://{place}/podman.sock", place / "service.log"
    with log.open("wb") as file:
        service = subprocess.Popen(
            # It ends with this process, however that ends.
            ["setpriv", "--pdeathsig=TERM", *_command(place), "system", "service", "--time=0", url],
            env=environment, cwd=place,  # conmon leaves a file where it runs when memory runs out
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        _wait_for(place / "podman.sock", service, log)
        yield url
    finally:
        service.terminate()
        try:
            service.wait(30)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
        # What a container that failed half-way has left.
        for mount in sorted(mounts(), key=lambda mount: -len(mount.mountpoint)):
            if mount.mountpoint.startswith(f"{place}/"):
                subprocess.run(["umount", "-l", mount.mountpoint], check=True)
        _remove(place)


def _remove(place: Path) -> None:
    """Remove the directory; Podman's monitors may still be cleaning up after commands in it."""
    deadline_s = time.monotonic() + SERVICE_TIMEOUT_S
    while place.exists():
        try:
            shutil.rmtree(place)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY} or time.monotonic() > deadline_s:
                raise


def _wait_for(path: Path, service: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + SERVICE_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if not probe.connect_ex(str(path)):
                return
        if service.poll() is not None or time.monotonic() > deadline_s:
            raise NoPodmanError(log.read_text(errors="replace")[-1000:])
        time.sleep(0.05)
