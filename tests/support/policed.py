"""Workspaces with a policy: their content and patterns, and every system call that makes a name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from protocol.linux import portable
from protocol.volume import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT
from tests.mount.conftest import mounted
from tests.support.lower_layers import make
from vfsd import Workspace

# Names and patterns that are not UTF-8.
RAW_PROTECTED: Final = os.fsdecode(b"fig\xe9.txt")
RAW_HIDDEN: Final = os.fsdecode(b"r\xe9serv\xe9")
PROTECT: Final = ("src/secret", "*.lock", "vendor/", os.fsdecode(b"fig\xe9*"))
HIDE: Final = (".env", "private/", "hidden/inside", os.fsdecode(b"r\xe9serv?"))
POLICY: Final = {"protect": PROTECT, "hide": HIDE}
PROTECTED: Final = ("src/secret", "alias", "top.lock", "vendor/lib", "vendor/deep/lib", RAW_PROTECTED)
# Each name that a program could find; `envalias` is a further name of a hidden file.
HIDDEN: Final = (".env", "envalias", "src/.env", "private", "private/key", "hidden/inside", "only/.env", RAW_HIDDEN)
HIDDEN_COUNT: Final = 7  # without what is below a hidden directory


def fill(root: Path) -> None:
    """Make the content of a workspace: `alias` and `envalias` are further names of a protected and of a hidden file."""
    for name in ("src", "vendor/deep", "private", "hidden/other", "only", "empty"):
        (root / name).mkdir(parents=True)
    for name, text in {
        "src/secret": "secret", "src/free": "free", "top.lock": "lock", "vendor/lib": "lib", "vendor/deep/lib": "lib",
        ".env": "TOKEN", "src/.env": "TOKEN", "private/key": "key", "hidden/inside": "in", "hidden/seen": "seen",
        "only/.env": "TOKEN", "free": "free", RAW_PROTECTED: "figure", RAW_HIDDEN: "reserved",
    }.items():  # fmt: skip
        (root / name).write_text(text)
    os.link(root / "src/secret", root / "alias")
    os.link(root / ".env", root / "envalias")


@contextmanager
def policed(on: str, place: Path, **options: Any) -> Iterator[tuple[Workspace, Path]]:
    """Provide a mount with the policy over the content, and the directory that the content comes from.

    `on` is an engine and a backend, such as "native-overlay".
    """
    engine, _, backend = on.partition("-")
    below = place / "below"
    below.mkdir()
    fill(below)
    options = {"engine": engine, "name": f"{place.parent.name}-{place.name}"[-60:], **POLICY, **options}
    if backend == "memory":
        make("archive", below, place / "content.zip")
        options["archive"] = place / "content.zip"
    else:
        options["backend"] = f"{backend}:{below}"
    with mounted(place / "mount", **options) as workspace:
        yield workspace, below


# -- errors and states ----------------------------------------------------------------------------------
def error_of(act: Callable[[], object]) -> str | None:
    """Return the name of the errno with which `act` fails."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def fails(code: int, act: Callable[[], object]) -> None:
    """Assert that `act` fails with this errno."""
    assert error_of(act) == errno.errorcode[code]


def state(root: Path) -> dict[str, object]:
    """Return everything that a program sees, contents and metadata included."""
    found: dict[str, object] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            try:
                seen = path.lstat()
            except FileNotFoundError:
                continue  # a further name of a hidden file
            content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
            found[str(path.relative_to(root))] = (
                content, seen.st_mode, seen.st_uid, seen.st_nlink, seen.st_mtime_ns, seen.st_size
            )  # fmt: skip
    return found


# -- calls ----------------------------------------------------------------------------------------------
def renameat2(source: Path, target: Path, flags: int) -> None:
    here = os.open("/", os.O_PATH)
    try:
        portable.renameat2(here, os.fsencode(source)[1:], here, os.fsencode(target)[1:], flags)
    finally:
        os.close(here)


def link_descriptor(descriptor: int, target: Path) -> None:
    """Give a name to an open file."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, at_empty_path = -100, 0x1000  # linux/fcntl.h
    if libc.linkat(descriptor, b"", at_fdcwd, os.fsencode(target), at_empty_path):
        raise OSError(ctypes.get_errno(), "linkat")


def new(root: Path) -> Path:
    """Make a file outside the content."""
    path = root / "new"
    path.write_text("new")
    return path


def attempts(root: Path, name: str) -> dict[str, Callable[[], object]]:
    """Return every way to change the file `name`."""
    path, other = root / name, root / "free"

    def with_open(flags: int) -> Callable[[], object]:
        return lambda: os.close(os.open(path, flags))

    def through_readable() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)

    def by_descriptor(act: Callable[[int], object]) -> Callable[[], object]:
        def run() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                act(descriptor)
            finally:
                os.close(descriptor)

        return run

    return {
        "O_WRONLY": with_open(os.O_WRONLY),
        "O_RDWR": with_open(os.O_RDWR),
        "O_APPEND": with_open(os.O_WRONLY | os.O_APPEND),
        "O_TRUNC": with_open(os.O_WRONLY | os.O_TRUNC),
        "O_RDONLY | O_TRUNC": with_open(os.O_RDONLY | os.O_TRUNC),
        "O_CREAT": with_open(os.O_WRONLY | os.O_CREAT),
        "O_DIRECT": with_open(os.O_RDWR | os.O_DIRECT),
        "/proc/self/fd": through_readable,
        "truncate": lambda: os.truncate(path, 0),
        "truncate to the same size": lambda: os.truncate(path, path.stat().st_size),
        "chmod": lambda: path.chmod(0o777),
        "fchmod": by_descriptor(lambda descriptor: os.fchmod(descriptor, 0o777)),
        "chown": lambda: os.chown(path, 1, 1),
        "lchown": lambda: os.lchown(path, 1, 1),
        "utime": lambda: os.utime(path, (1, 1)),
        "futime": by_descriptor(lambda descriptor: os.utime(descriptor, (1, 1))),
        "setxattr": lambda: os.setxattr(path, "user.note", b"1"),
        "fsetxattr": by_descriptor(lambda descriptor: os.setxattr(descriptor, "user.note", b"1")),
        "removexattr": lambda: os.removexattr(path, "user.there"),
        "unlink": path.unlink,
        "rename": lambda: path.rename(root / "moved"),
        "rename over it": lambda: new(root).rename(path),
        "rename to a file with another type": lambda: renameat2(path, root / "empty", RENAME_EXCHANGE),
        "RENAME_NOREPLACE": lambda: renameat2(path, root / "moved", RENAME_NOREPLACE),
        "RENAME_EXCHANGE": lambda: renameat2(other, path, RENAME_EXCHANGE),
        "RENAME_WHITEOUT": lambda: renameat2(path, root / "moved", RENAME_WHITEOUT),
        "link": lambda: os.link(path, root / "linked"),
        "link of a descriptor": by_descriptor(lambda descriptor: link_descriptor(descriptor, root / "linked")),
    }


def creations(root: Path, path: Path) -> dict[str, Callable[[], object]]:
    """Return every call that makes the name `path`.  They use `root`/new and `root`/free, on the same mount."""
    new = root / "new"

    def opening(flags: int) -> Callable[[], object]:
        return lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600))

    def renaming(make_new: Callable[[], object], flags: int = 0) -> Callable[[], object]:
        def run() -> None:
            make_new()
            try:
                renameat2(new, path, flags)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    (new.rmdir if stat.S_ISDIR(new.lstat().st_mode) else new.unlink)()

        return run

    def linking_unnamed() -> None:
        try:
            descriptor = os.open(root, os.O_TMPFILE | os.O_WRONLY)
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP  # noqa: PT017  (pyfuse3)
            raise PermissionError(errno.EPERM, "there is no such call") from None
        try:
            link_descriptor(descriptor, path)
        finally:
            os.close(descriptor)

    def binding() -> None:
        directory = os.open(path.parent, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(os.fsencode(f"/proc/self/fd/{directory}/") + os.fsencode(path.name))
        finally:
            os.close(directory)

    return {
        "O_CREAT": opening(0),
        "O_CREAT | O_EXCL": opening(os.O_EXCL),
        "O_CREAT | O_TRUNC": opening(os.O_TRUNC),
        "O_CREAT | O_NOFOLLOW": opening(os.O_NOFOLLOW),
        "mkdir": path.mkdir,
        "symlink": lambda: path.symlink_to("free"),
        "dangling symlink": lambda: path.symlink_to("nowhere"),
        "mknod of a file": lambda: os.mknod(path, stat.S_IFREG | 0o600),
        "mknod of a fifo": lambda: os.mkfifo(path),
        "mknod of a device": lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        "bind": binding,
        "link": lambda: os.link(root / "free", path),
        "link of an unnamed file": linking_unnamed,
        "rename of a file": renaming(new.touch),
        "rename of a directory": renaming(new.mkdir),
        "rename of a symlink": renaming(lambda: new.symlink_to("free")),
        "RENAME_NOREPLACE": renaming(new.touch, RENAME_NOREPLACE),
    }
