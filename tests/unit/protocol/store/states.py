"""What a directory is, down to nanoseconds and link groups; and random changes of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from dataclasses import dataclass
from typing import Any

from protocol.tree import Tree, filled

Facts = tuple[Any, ...]


@dataclass(frozen=True)
class State:
    """All that a restore has to bring back."""

    files: dict[bytes, Facts]
    links: tuple[tuple[bytes, ...], ...]


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    names = os.listxattr(path, follow_symlinks=False)
    return tuple(sorted((name, os.getxattr(path, name, follow_symlinks=False)) for name in names))


def _facts(path: bytes) -> Facts:
    seen = os.lstat(path)
    content: bytes | None = None
    if stat.S_ISLNK(seen.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(seen.st_mode):
        with open(path, "rb") as file:
            content = file.read()
    return (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, seen.st_rdev, content, _xattrs(path))


def state_of(root: str | os.PathLike[str]) -> State:
    """The state of a directory."""
    top = os.fsencode(root)
    files = {b"": _facts(top)}
    groups: dict[int, list[bytes]] = {}
    for directory, below, names in os.walk(top):
        for name in below + names:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, top)
            files[relative] = _facts(path)
            seen = os.lstat(path)
            if seen.st_nlink > 1 and not stat.S_ISDIR(seen.st_mode):
                groups.setdefault(seen.st_ino, []).append(relative)
    return State(files, tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)))


def state_of_tree(tree: Tree) -> State:
    """The state that a tree shows."""
    files: dict[bytes, Facts] = {}
    groups: dict[int, list[bytes]] = {}
    for entry in tree.walk():
        content: bytes | None = None
        if entry.is_symlink:
            content = entry.target
        elif entry.is_file:
            content = b"".join(filled(tree.chunks(entry.path)))
        xattrs = tuple(sorted((os.fsdecode(name), value) for name, value in entry.xattrs.items()))
        files[entry.path] = (entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.rdev, content, xattrs)
        if entry.inode and not entry.is_dir:
            groups.setdefault(entry.inode, []).append(entry.path)
    return State(files, tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)))


def differences(one: State, other: State) -> list[bytes]:
    """The paths that differ, for a message."""
    paths = one.files.keys() | other.files.keys()
    return sorted(path for path in paths if one.files.get(path) != other.files.get(path))


class Chaos:
    """Random changes of a directory, the same ones for the same seed."""

    def __init__(self, root: str | os.PathLike[str], seed: int) -> None:
        self.root = os.fspath(root)
        self.random = random.Random(seed)

    def paths(self) -> list[str]:
        return sorted(os.path.join(at, name) for at, below, names in os.walk(self.root) for name in below + names)

    def _new(self) -> str:
        directories = [path for path in self.paths() if os.path.isdir(path) and not os.path.islink(path)]
        name = self.random.choice("abcdefgh") + self.random.choice(["", "1", "-x"])
        return os.path.join(self.random.choice([self.root, *directories]), name)

    def change(self, times: int = 1) -> None:
        """Change something, or a few things."""
        for _ in range(times):
            # Not every change is possible: a name may be taken, a directory not be linked.
            with contextlib.suppress(OSError):
                self._change()

    def _change(self) -> None:  # noqa: C901, PLR0912 -- a table
        new, there = self._new(), self.paths()
        old = self.random.choice(there or [new])
        kind = self.random.randrange(16)
        if kind < 5:
            if not os.path.lexists(new) or os.path.isfile(new):
                size = self.random.choice([0, 1, 100, 5000])
                with open(new, "wb") as file:
                    file.write(self.random.randbytes(size))
        elif kind == 5:
            os.mkdir(new)
        elif kind == 6:
            os.symlink(f"target-{self.random.randrange(9)}", new)
        elif kind == 7:
            os.link(old, new, follow_symlinks=False)
        elif kind == 8:
            os.chmod(old, self.random.choice([0o644, 0o755, 0o4755, 0o2711, 0o600]))
        elif kind == 9:
            os.rename(old, new)
        elif kind == 10:
            shutil.rmtree(old) if os.path.isdir(old) and not os.path.islink(old) else os.unlink(old)
        elif kind == 11:
            os.setxattr(old, "user.note", b"%d" % self.random.randrange(5))
        elif kind == 12:
            os.utime(old, ns=(1, self.random.randrange(10**18)), follow_symlinks=False)
        elif kind == 13:
            os.mkfifo(new)
        elif kind == 14:
            os.chown(old, self.random.randrange(3), self.random.randrange(3), follow_symlinks=False)
        elif os.path.isfile(old):
            with open(old, "r+b") as file:
                file.seek(self.random.randrange(300_000))
                file.write(b"x")
