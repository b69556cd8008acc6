"""Images made of what this machine has: no registry is asked.  `busybox` is a shell and its tools, `python` adds a
Python with the parts of its standard library that a helper, or a small test run, needs."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.util import cache_from_source
from pathlib import Path

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
