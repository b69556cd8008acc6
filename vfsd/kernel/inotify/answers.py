"""The answers to the requests of the thread that repeats changes for inotify.

Threading: runs on the loop, except `Answers.step`, which the thread replaces between two of its system calls.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable
from typing import Final, cast

import msgspec

from protocol.errors import os_error
from protocol.volume import (
    ROOT_INODE,
    Answer,
    AttributeChanges,
    Attributes,
    OrphanFindingVolume,
    PlainAttributes,
    Volume,
    VolumeCapabilities,
)
from protocol.volume_extensions import EntryChange

_FIRST_GHOST: Final = 1 << 62  # ghosts are numbered from here; a volume numbers its inodes from 1


Ghost = PlainAttributes  # the attributes of an inode that does not exist


class Step(msgspec.Struct):
    """The change that the thread is repeating: it removes `ghost`, or creates what exists if `ghost` is None.

    `ghosts` are all ghosts that this step has shown, by inode number.  `detour` is the name of a detour (see
    `calls._remove`) or empty, `detours` counts its lookups.
    """

    change: EntryChange
    ghost: Ghost | None
    detour: bytes = b""
    detours: int = 0
    ghosts: dict[int, Ghost] = msgspec.field(default_factory=dict)
    was_looked_up: bool = False  # the kernel has looked the name up during this system call
    is_outdated: bool = False  # another process has changed the name since the restore


class Answers:
    """The volume as the thread sees it: an `Impersonator`'s volume.  It changes nothing except lookup counts."""

    capabilities: Final = VolumeCapabilities()

    def __init__(self, volume: Volume) -> None:
        self.step: Step | None = None
        self.probe = b""  # the name that the thread looks up to verify that it is on this mount
        self.was_probed = False
        self.orphan_name = b""  # the name in the root that refers to `orphan`, in one lookup
        self.orphan = 0
        self._orphans = cast("OrphanFindingVolume", volume) if volume.capabilities.orphans else None
        self._volume = volume
        self._last_ghost = _FIRST_GHOST

    def lookup(self, parent: int, name: bytes) -> Attributes:
        if name == self.probe and parent == ROOT_INODE:
            self.was_probed = True
            raise os_error(errno.ENOENT)
        if name == self.orphan_name and parent == ROOT_INODE:
            return self._lookup_orphan()
        step = self.step
        if step is None or step.change.parent != parent:
            return _result(self._volume.lookup(parent, name))
        if name == step.detour:
            step.detours += 1
            if step.detours == 1:
                raise os_error(errno.ESTALE)
            return self._show(step, self.new_ghost(stat.S_IFDIR))
        if name != step.change.name or not self._is_as_restored(step):
            return _result(self._volume.lookup(parent, name))
        if step.detours > 1:
            step.detours = 0
            return self._show(step, self.new_ghost(stat.S_IFDIR))
        step.was_looked_up = True
        if step.ghost is None:
            raise os_error(errno.ENOENT)
        return self._show(step, step.ghost)

    def _lookup_orphan(self) -> Attributes:
        inode, self.orphan = self.orphan, 0
        if self._orphans is None or not inode:
            raise os_error(errno.ENOENT)
        return self._orphans.lookup_orphan(inode)

    def is_orphan(self, inode: int) -> bool:
        return self._orphans is not None and self._orphans.is_orphan(inode)

    def new_ghost(self, file_type: int) -> Ghost:
        self._last_ghost += 1
        return Ghost(self._last_ghost, file_type | 0o700, uid=os.geteuid(), gid=os.getegid())

    @staticmethod
    def _show(step: Step, ghost: Ghost) -> Ghost:
        step.ghosts[ghost.inode] = ghost
        return ghost

    def getattr(self, inode: int) -> Attributes:
        step = self.step
        if step is not None and inode in step.ghosts:
            return step.ghosts[inode]
        return _result(self._volume.getattr(inode))

    def setattr(self, inode: int, _changes: AttributeChanges) -> Attributes:
        return self.getattr(inode)

    def mkdir(self, parent: int, name: bytes, *_: object) -> Attributes:
        """Answer MKDIR, MKNOD and SYMLINK with the inode that exists."""
        step = self._step_at(parent, name)
        if step is None or step.ghost is not None or not step.was_looked_up or not self._is_as_restored(step):
            raise os_error(errno.EEXIST)
        return _result(self._volume.lookup(parent, name))

    mknod = symlink = mkdir

    def unlink(self, parent: int, name: bytes) -> None:
        step = self._step_at(parent, name)
        if step is None or step.ghost is None or not step.was_looked_up:
            # The kernel is about to remove an inode from its cache, not the ghost.
            raise os_error(errno.ESTALE)
        step.was_looked_up = False

    rmdir = unlink

    def link(self, *_: object) -> Attributes:
        raise os_error(errno.EPERM)

    def rename(self, *_: object) -> None:
        raise os_error(errno.EPERM)

    def _step_at(self, parent: int, name: bytes) -> Step | None:
        step = self.step
        return step if step is not None and step.change.parent == parent and step.change.name == name else None

    def _is_as_restored(self, step: Step) -> bool:
        """Whether the name still refers to the inode that it referred to after the restore."""
        try:
            inode = _result(self._volume.lookup(step.change.parent, step.change.name)).inode
        except FileNotFoundError:
            inode = 0
        else:
            self._volume.forget(inode, 1)
        step.is_outdated = inode != step.change.new
        return not step.is_outdated


def _result(answer: Answer[Attributes]) -> Attributes:
    # Volumes with snapshots return results, never awaitables.
    assert not isinstance(answer, Awaitable)
    return answer
