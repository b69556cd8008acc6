"""A Podman service of one's own, on a storage of its own: for the tests and the benchmarks."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
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


BUSYBOX_PACKAGES = ("busybox-static",)
_DIRECTORIES = {"tmp": 0o1777, "root": 0o700, "home/dev": 0o755, "var/tmp": 0o1777}
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1000:dev:/home/dev:/bin/sh\n"
_GROUP = b"root:x:0:\ndev:x:1000:\n"
_STDLIB_PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "email", "encodings", "html", "http", "importlib", "json",
    "logging", "multiprocessing", "re", "sqlite3", "unittest", "urllib", "zipfile",
)  # fmt: skip
# Big, and nobody imports them here.
_STDLIB_WITHOUT = ("pydoc.py", "turtle.py", "pydoc_data")


def busybox() -> str:
    """The path of busybox, best a static one; FileNotFoundError where there is none."""
    path = shutil.which("busybox")
    if path is None:
        raise FileNotFoundError(f"busybox is missing: install {BUSYBOX_PACKAGES[0]}")
    return path


def write_busybox_image(target: Path) -> None:
    """A tar of a root directory with busybox, its tools, and the users root and dev (1000)."""
    with tarfile.open(target, "w") as tar:
        _add_busybox(tar)


def write_python_image(target: Path) -> None:
    """As busybox's, and with this interpreter's own Python as /usr/bin/python3, at the paths that it has here."""
    with tarfile.open(target, "w") as tar:
        _add_busybox(tar)
        _add_python(tar)


def _add_busybox(tar: tarfile.TarFile) -> None:
    for name, mode in _DIRECTORIES.items():
        _add_directory(tar, name, mode)
    tar.add(busybox(), "bin/busybox")
    for library in _needed_by(Path(busybox())):  # none, of a static one
        tar.add(library.resolve(), str(library).lstrip("/"))
    for applet in subprocess.run([busybox(), "--list"], check=True, capture_output=True, text=True).stdout.split():
        if applet != "busybox":
            _add_link(tar, f"bin/{applet}", "busybox")
    _add_file(tar, "etc/passwd", _PASSWD)
    _add_file(tar, "etc/group", _GROUP)


def _add_python(tar: tarfile.TarFile) -> None:
    executable = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    stdlib = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    modules = [path for path in stdlib.glob("*.py") if path.name not in _STDLIB_WITHOUT]
    packages = [path for name in _STDLIB_PACKAGES for path in (stdlib / name).rglob("*.py") if "test" not in path.parts]
    dynamic = Path(sysconfig.get_config_var("DESTSHARED") or stdlib / "lib-dynload")
    libraries = [path for path in dynamic.glob("*.so") if "_test" not in path.name and "xx" not in path.name]
    sources = [*modules, *packages]
    # Otherwise each Python of a new container compiles what it imports: 0.3 s of CPU until the helper runs.
    compiled = [cached for path in sources if (cached := Path(cache_from_source(path))).exists()]
    added: set[Path] = set()
    for path in [executable, *sources, *compiled, *libraries]:
        _add_once(tar, path, added)
    for path in [executable, *libraries]:
        for library in _needed_by(path):
            _add_once(tar, library, added)
    _add_link(tar, "usr/bin/python3", str(executable))
    _add_file(tar, "etc/ld.so.conf", "".join(f"{d}\n" for d in sorted({str(p.parent) for p in added})).encode())


def _needed_by(binary: Path) -> list[Path]:
    """The shared libraries that it is linked with."""
    shown = subprocess.run(["ldd", binary], check=False, capture_output=True, text=True).stdout
    return [Path(found) for found in re.findall(r"(/\S+) \(0x", shown)]


def _add_once(tar: tarfile.TarFile, path: Path, added: set[Path]) -> None:
    if path not in added:
        added.add(path)
        # As a file, whatever it is a link to: links between directories of a host mean nothing in there.
        tar.add(path.resolve(), str(path).lstrip("/"))


def _add_directory(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    if name == "home/dev":
        entry.uid = entry.gid = 1000
    tar.addfile(entry)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
