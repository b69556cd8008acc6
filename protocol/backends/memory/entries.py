"""Entries: making, removing and renaming the names in directories, as fs/namei.c and tmpfs do it."""

from __future__ import annotations

import errno
import stat
from typing import Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.base import Base, missing, shown
from protocol.backends.memory.inode import Inode
from protocol.backends.memory.ledger import SLACK_BYTES, version_bytes
from protocol.errors import os_error
from protocol.volume import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    ROOT_INODE,
    Caller,
)

__all__ = ["Entries"]

SYMLINK_MAX: Final = 4095  # PATH_MAX without its NUL, linux/limits.h
_SLASH: Final = ord("/")  # bytes look for a number in a sixth of the time that they look for bytes in
_KIND: Final = 0o170000  # S_IFMT as a mask: calling the function takes longer than what it is asked for
_REGULAR: Final = stat.S_IFREG
_SET_GID: Final = stat.S_ISGID
_MADE_OTHERWISE: Final = frozenset({stat.S_IFDIR, stat.S_IFLNK})
_RENAME_FLAGS: Final = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT
_DEVICES: Final = frozenset({stat.S_IFCHR, stat.S_IFBLK})
_DOTS: Final = frozenset({b".", b".."})
_SUPERUSER: Final = Caller(0, 0)


class Entries(Base):
    """The part of a `MemoryVolume` that changes directories.  See `protocol.volume.Volume` for each method."""

    # -- making and removing entries ---------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Inode:
        kind = mode & _KIND or _REGULAR
        if kind in _MADE_OTHERWISE:
            raise os_error(errno.EPERM)
        directory = self._room_for(parent, name)
        node = self._new(directory, kind | (mode & 0o7777), caller)
        if kind in _DEVICES:
            node.rdev = rdev
        return self._enter(directory, name, node)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Inode:
        directory = self._room_for(parent, name)
        inherited = directory.mode & stat.S_ISGID
        node = self._new(directory, stat.S_IFDIR | (mode & 0o7777) | inherited, caller)
        return self._enter(directory, name, node)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        if not target:
            raise os_error(errno.ENOENT)
        if len(target) > SYMLINK_MAX:
            raise os_error(errno.ENAMETOOLONG)
        directory = self._room_for(parent, name)
        node = self._state.create(stat.S_IFLNK | 0o777, caller.uid, _group(directory, caller))
        self._state.set_target(node, target)
        return self._enter(directory, name, node)

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Inode:
        self._check_writable()
        directory = self._directory(parent)
        self._check_room(0, 1)
        self._require(SLACK_BYTES)
        node = self._new(directory, stat.S_IFREG | (mode & 0o7777), caller)
        node.lookups = 1
        return node

    def link(self, inode: int, parent: int, name: bytes) -> Inode:
        node = self.getattr(inode)
        if node.is_dir:
            raise os_error(errno.EPERM)
        directory = self._room_for(parent, name, inodes=0)
        node = self._changeable(node)
        node.ctime_ns = self._clock()
        return self._enter(directory, name, node)

    def unlink(self, parent: int, name: bytes) -> None:
        directory, node = self._victim(parent, name)
        if node.children is not None:
            raise os_error(errno.EISDIR, shown(name))
        self._remove(directory, name, node)

    def rmdir(self, parent: int, name: bytes) -> None:
        if name == b".":
            raise os_error(errno.EINVAL)
        if name == b"..":
            raise os_error(errno.ENOTEMPTY)
        directory, node = self._victim(parent, name)
        if node.children is None:
            raise os_error(errno.ENOTDIR, shown(name))
        if node.children:
            raise os_error(errno.ENOTEMPTY, shown(name))
        self._remove(directory, name, node)

    # -- rename ------------------------------------------------------------------------------------
    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = _SUPERUSER,
    ) -> None:
        if flags and (flags & ~_RENAME_FLAGS or (flags & RENAME_EXCHANGE and flags != RENAME_EXCHANGE)):
            raise os_error(errno.EINVAL)
        source, node = self._victim(parent, name)
        target = self._directory(new_parent)
        _check_name(new_name)
        assert target.children is not None
        number = target.children.get(new_name)
        victim = self._inodes[number] if number is not None else None
        if flags & RENAME_EXCHANGE:
            if victim is None:
                raise missing(new_name)
            self._check_not_below(node, target)
            self._check_not_below(victim, source)
            self._require_versions(node, victim, source, target)
            self._exchange(source, name, node, target, new_name, victim)
            return
        if victim is not None and flags & RENAME_NOREPLACE:
            raise os_error(errno.EEXIST, shown(new_name))
        if target.nlink == 0:
            raise missing(new_name)
        if node.children is not None:
            self._check_not_below(node, target)
        if victim is node:
            return  # two names of one file: rename(2) does nothing
        if victim is not None:
            self._check_replaceable(node, victim, new_name)
        if flags & RENAME_WHITEOUT and victim is None:
            self._check_room(0, 1)
        if self._ledger.metadata > self._checked_metadata or self._state.log.newest is not None:
            self._require_versions(node, source, target)
        self._move(source, name, node, target, new_name, victim)
        if flags & RENAME_WHITEOUT:
            self._leave_whiteout(parent, name, caller)

    def _require_versions(self, *nodes: Inode) -> None:
        """ENOSPC: no memory for the old versions of what a rename changes, and for a longer name."""
        state = self._state
        if self._ledger.metadata > self._checked_metadata:
            self._check_entry()
        if state.log.newest is None:
            return
        needed = SLACK_BYTES
        needed += sum(version_bytes(node) for node in nodes if node.epoch != state.epoch)
        self._require(needed)

    def _check_not_below(self, node: Inode, directory: Inode) -> None:
        if node.children is None:
            return
        while directory.inode != ROOT_INODE:
            if directory is node:
                raise os_error(errno.EINVAL)
            directory = self._parent(directory)

    def _check_replaceable(self, node: Inode, victim: Inode, name: bytes) -> None:
        if victim.children is not None:
            if not node.is_dir:
                raise os_error(errno.EISDIR, shown(name))
            if victim.children:
                raise os_error(errno.ENOTEMPTY, shown(name))
        elif node.is_dir:
            raise os_error(errno.ENOTDIR, shown(name))

    def _move(
        self, source: Inode, name: bytes, node: Inode, target: Inode, new_name: bytes, victim: Inode | None
    ) -> None:
        state = self._state
        now = self._clock()
        node = state.own(node)
        source = state.own(source)
        target = state.own(self._inodes[target.inode])  # not the old version of `source`, if they are one
        if victim is not None:
            victim = state.own(victim)
            state.drop_entry(target, new_name, victim)
            victim.ctime_ns = now
            state.release(victim)
        state.move_entry(source, name, target, new_name, node)
        _modified(source, now)
        if target is not source:
            _modified(target, now)
        node.ctime_ns = now

    def _leave_whiteout(self, parent: int, name: bytes, caller: Caller) -> None:
        """What overlayfs reads as "nothing here": a character device 0:0, which anybody may make."""
        directory = self._directory(parent)
        self._enter(directory, name, self._new(directory, stat.S_IFCHR, caller)).lookups = 0

    def _exchange(self, a: Inode, a_name: bytes, a_node: Inode, b: Inode, b_name: bytes, b_node: Inode) -> None:
        if a_node is b_node:
            return
        state = self._state
        now = self._clock()
        a_node, b_node, a = state.own(a_node), state.own(b_node), state.own(a)
        b = state.own(self._inodes[b.inode])  # not the old version of `a`, if they are one
        state.exchange_entries(a, a_name, a_node, b, b_name, b_node)
        for node in (a, b):
            _modified(node, now)
        a_node.ctime_ns = b_node.ctime_ns = now

    # -- helpers ---------------------------------------------------------------------------------------
    def _victim(self, parent: int, name: bytes) -> tuple[Inode, Inode]:
        """The directory, and what `name` in it stands for, both about to change."""
        if self.read_only:
            raise os_error(errno.EROFS)
        directory = self._directory(parent)
        try:
            return directory, self._inodes[directory.children[name]]  # type: ignore[index]
        except KeyError:
            raise missing(name) from None

    def _room_for(self, parent: int, name: bytes, inodes: int = 1) -> Inode:
        """The directory, after making sure that `name` can be made in it."""
        if self.read_only:
            raise os_error(errno.EROFS)
        directory = self._inodes.get(parent)
        if directory is None or directory.children is None:
            directory = self._directory(parent)
            assert directory.children is not None
        if len(name) > NAME_MAX or not name or _SLASH in name or 0 in name:
            _check_name(name)
        if name in directory.children or name in _DOTS:
            raise os_error(errno.EEXIST, shown(name))
        if directory.nlink == 0:
            raise missing(name)  # removed while it was open
        if self.max_inodes is not None:
            self._check_room(0, inodes)
        if self._ledger.metadata > self._checked_metadata:
            self._check_entry()
        return directory

    def _new(self, directory: Inode, mode: int, caller: Caller) -> Inode:
        """An inode that nobody can see yet, its mode by the umask or by the ACL that takes its place."""
        if directory.xattrs is None:
            uid, gid, umask, _ = caller
            return self._state.create(mode & ~umask, uid, directory.gid if directory.mode & _SET_GID else gid)
        mode, acls = xattrs.inherited(directory.xattrs, mode, caller.umask)
        node = self._state.create(mode, caller.uid, _group(directory, caller))
        self._ledger.set_xattrs(node, acls)
        return node

    def _enter(self, directory: Inode, name: bytes, node: Inode) -> Inode:
        """Give `node` (owned) a name.  The directory gets its ctime: a new inode's times are all one, as on tmpfs."""
        state = self._state
        if directory.epoch != state.epoch:
            directory = state.own(directory)
        state.add_entry(directory, name, node)
        directory.mtime_ns = directory.ctime_ns = node.ctime_ns
        node.lookups += 1
        return node

    def _remove(self, directory: Inode, name: bytes, node: Inode) -> None:
        state = self._state
        epoch = state.epoch
        if directory.epoch != epoch:
            directory = state.own(directory)
        if node.epoch != epoch:
            node = state.own(node)
        state.drop_entry(directory, name, node)
        directory.mtime_ns = directory.ctime_ns = node.ctime_ns = self._clock()
        if node.nlink == 0 and node.lookups <= 0:
            state.release(node)


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise os_error(errno.ENAMETOOLONG)
    if not name or _SLASH in name or 0 in name:
        raise os_error(errno.EINVAL, shown(name))


def _group(directory: Inode, caller: Caller) -> int:
    """The group of what `caller` makes in `directory`."""
    return directory.gid if directory.mode & _SET_GID else caller.gid


def _modified(directory: Inode, now_ns: int) -> None:
    directory.mtime_ns = directory.ctime_ns = now_ns
