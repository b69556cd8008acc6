"""The systems that bench.rewind compares: each takes snapshots of a directory, restores and forks them.

Each has an empty directory of its own, in memory: a workspace, a tmpfs, or a btrfs whose image is in a tmpfs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench._filesystems import GapError, run, tmpfs
from bench._real import GIT
from vfsd.client.workspace import Workspace

SYSTEMS: Final = ("vfsd call", "vfsd command", "git", "cp -a", "cp --reflink", "btrfs")
IMAGE_BYTES: Final = 4 << 30
NO_GIT_SETTINGS: Final = {**GIT, "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "gc.auto", "GIT_CONFIG_VALUE_0": "0"}


class System:
    """A way to take snapshots of the directory `live` and to restore them."""

    def __init__(self, live: Path) -> None:
        self.live = live

    def begin(self) -> None:
        """Prepare after the tree was made.  Not measured."""

    def snapshot(self, name: str) -> None:
        raise NotImplementedError

    def restore(self, name: str) -> None:
        """Restore the last snapshot, `name`."""
        raise NotImplementedError

    def fork(self, name: str, place: Path) -> None:
        """Make an independent copy of the snapshot at `place`, which does not exist.  GapError: cannot."""
        raise NotImplementedError

    def forget(self, name: str, place: Path | None) -> None:
        """Remove the snapshot and the fork at `place`.  Not measured."""


class VfsdCall(System):
    def __init__(self, workspace: Workspace) -> None:
        super().__init__(Path(workspace.path))
        self._workspace = workspace
        self._fork: Path | None = None

    def snapshot(self, name: str) -> None:
        self._workspace.snapshot(name)

    def restore(self, name: str) -> None:
        self._workspace.restore(name)

    def fork(self, name: str, place: Path) -> None:
        self._fork = place
        self._workspace.fork(place, snapshot=name).__enter__()  # unmounted in `forget`

    def forget(self, name: str, place: Path | None) -> None:  # noqa: ARG002
        self.end()
        self._workspace.drop(name)

    def end(self) -> None:
        """Unmount the fork, if there is one."""
        if self._fork is not None and self._fork.is_mount():
            Workspace.attach(str(self._fork)).unmount(lazy=True)
            self._fork.rmdir()
        self._fork = None


class VfsdCommand(VfsdCall):
    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        self._vfsd = str(Path(sys.executable).with_name("vfsd"))
        self._options = ("-w", workspace.name)

    def snapshot(self, name: str) -> None:
        run(self._vfsd, "snapshot", *self._options, name)

    def restore(self, name: str) -> None:
        run(self._vfsd, "restore", *self._options, name)

    def fork(self, name: str, place: Path) -> None:
        self._fork = place
        run(self._vfsd, "fork", *self._options, "--snapshot", name, place)


class Git(System):
    """Commits on one branch: HEAD is the last snapshot, which is the one that is restored and forked."""

    def _git(self, *words: str | Path) -> str:
        return run("git", *words, cwd=self.live, env=NO_GIT_SETTINGS)

    def begin(self) -> None:
        self._git("init", "-q")
        self.snapshot("first")

    def snapshot(self, name: str) -> None:
        self._git("add", "-A")
        self._git("commit", "-q", "--allow-empty", "-m", name)

    def restore(self, name: str) -> None:  # noqa: ARG002
        self._git("reset", "-q", "--hard", "HEAD")
        self._git("clean", "-q", "-fdx")

    def fork(self, name: str, place: Path) -> None:  # noqa: ARG002
        self._git("worktree", "add", "-q", "--detach", place, "HEAD")

    def forget(self, name: str, place: Path | None) -> None:  # noqa: ARG002
        if place is not None:
            self._git("worktree", "remove", "--force", place)


class Copy(System):
    def _copy(self, name: str) -> Path:
        return self.live.with_name(f"copy-{name}")

    def snapshot(self, name: str) -> None:
        run("cp", "-a", "--reflink=auto", self.live, self._copy(name))

    def restore(self, name: str) -> None:
        run("rm", "-rf", self.live)
        self.fork(name, self.live)

    def fork(self, name: str, place: Path) -> None:
        run("cp", "-a", "--reflink=auto", self._copy(name), place)

    def forget(self, name: str, place: Path | None) -> None:
        run("rm", "-rf", self._copy(name), *([place] if place else []))


class Btrfs(System):
    def _snapshot(self, name: str) -> Path:
        return self.live.with_name(f"snapshot-{name}")

    def snapshot(self, name: str) -> None:
        run("btrfs", "subvolume", "snapshot", "-r", self.live, self._snapshot(name))

    def restore(self, name: str) -> None:
        run("btrfs", "subvolume", "delete", self.live)
        self.fork(name, self.live)

    def fork(self, name: str, place: Path) -> None:
        run("btrfs", "subvolume", "snapshot", self._snapshot(name), place)

    def forget(self, name: str, place: Path | None) -> None:
        run("btrfs", "subvolume", "delete", self._snapshot(name), *([place] if place else []))


@contextmanager
def btrfs_image(place: Path) -> Iterator[Path]:
    """Mount a new btrfs in an image in memory.  GapError: the machine cannot."""
    for program in ("mkfs.btrfs", "btrfs", "losetup"):
        if shutil.which(program) is None:
            raise GapError(f"{program} is missing")
    with tmpfs(place) as top:
        image, mountpoint = top / "image", top / "mount"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        mountpoint.mkdir()
        try:
            run("mkfs.btrfs", "-q", image)
            run("mount", "-o", "loop", image, mountpoint)
        except RuntimeError as error:
            raise GapError(f"no btrfs in a loop image: {' '.join(str(error).split())[-100:]}") from None
        try:
            yield mountpoint
        finally:
            run("umount", "-l", mountpoint)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@contextmanager
def systems(scratch: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[dict[str, System], dict[str, str]]]:
    """Yield the systems by name, each with an empty directory; and the missing ones with the reasons."""
    found: dict[str, System] = {}
    gaps: dict[str, str] = {}
    with ExitStack() as stack:

        def workspace(word: str) -> Workspace:
            name = f"bench-rewind-{word}-{os.getpid()}"
            return stack.enter_context(Workspace.mount(scratch / f"vfsd-{word}", name=name))

        def memory(word: str) -> Path:
            return _made(stack.enter_context(tmpfs(scratch / word)) / "live")

        def on_btrfs(word: str) -> Path:
            return stack.enter_context(btrfs_image(scratch / word))

        def subvolume() -> Path:
            live = on_btrfs("btrfs") / "live"
            run("btrfs", "subvolume", "create", live)
            return live

        def of_vfsd(kind: type[VfsdCall], word: str) -> System:
            system = kind(workspace(word))
            stack.callback(system.end)  # a fork remains after Ctrl-C, or if it is not what it should be
            return system

        makers: tuple[Callable[[], System], ...] = (
            lambda: of_vfsd(VfsdCall, "call"),
            lambda: of_vfsd(VfsdCommand, "command"),
            lambda: Git(memory("git")),
            lambda: Copy(memory("cp")),
            lambda: Copy(_made(on_btrfs("reflink") / "live")),
            lambda: Btrfs(subvolume()),
        )
        for name, make in zip(SYSTEMS, makers, strict=True):
            if not wanted(name):
                continue
            try:
                found[name] = make()
            except GapError as gap:
                gaps[name] = str(gap)
        yield found, gaps
