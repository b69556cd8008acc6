"""DirectoryEntries: the calls that find, list, make, remove and rename the names in directories.

See `protocol.volume.Volume` for each method.  Source: fs/namei.c, fs/libfs.c and mm/shmem.c.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protocol.backends.memory import xattrs
from protocol.backends.memory.files import InodeCalls
from protocol.backends.memory.ledger import SLACK_BYTES, version_bytes
from protocol.compiled import mypyc_attr
from protocol.directory_cookies import DirectoryCookies, downward
from protocol.errors import os_error
from protocol.tree import TYPE_MASK
from protocol.volume import (
    NAME_MAX,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    ROOT_INODE,
    SUPERUSER,
    Caller,
    PlainEntry,
)

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode

SYMLINK_MAX: Final = 4095  # PATH_MAX without its NUL, linux/limits.h
_SLASH: Final = ord("/")
_REGULAR: Final = stat.S_IFREG
_SET_GID: Final = stat.S_ISGID
_NOT_FOR_MKNOD: Final = frozenset({stat.S_IFDIR, stat.S_IFLNK})
_RENAME_FLAGS: Final = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT
_DEVICES: Final = frozenset({stat.S_IFCHR, stat.S_IFBLK})
_DOTS: Final = frozenset({b".", b".."})
_DOT_COOKIES: Final = ((1, b"."), (2, b".."))


@mypyc_attr(allow_interpreted_subclasses=True)
class DirectoryEntries(InodeCalls):
    """The calls that find, list, make, remove and rename the names in directories."""

    # -- finding and listing -----------------------------------------------------------------------
    def find(self, parent: int, name: bytes) -> Inode | None:
        """Look `name` up as `lookup` does, but return None if it does not exist.

        The kernel looks up every name before it makes it, so absence must not cost an exception.
        """
        directory = self._inodes.get(parent)
        if directory is None or directory.children is None:
            directory = self._state.directory(parent)
            assert directory.children is not None
        number = directory.children.get(name)
        if number is not None:
            inode = self._inodes[number]
        elif name == b".":
            inode = directory
        elif name == b"..":
            inode = self._state.parent(directory)
        elif len(name) > NAME_MAX:
            raise not_found(name)
        else:
            return None
        number = inode.inode
        lookups = self._state.lookups
        lookups[number] = lookups.get(number, 0) + 1
        return inode

    def forget(self, inode: int, count: int) -> None:
        """Take `count` lookups from an inode, if it exists."""
        recorder = self.recorder
        if recorder is not None:
            count = recorder.forgotten(inode, count)
        node = self._inodes.get(inode)
        if node is not None:
            lookups = self._state.lookups
            left = lookups.pop(inode, 0) - count
            if left:
                lookups[inode] = left
            elif node.nlink == 0:
                self._state.release(node)
                if recorder is not None:
                    recorder.freed(inode)

    def entry_count(self, inode: int) -> int:
        """Return how many names a directory has, without "." and ".."."""
        return len(self._state.directory(inode).children or ())

    def entries(self, inode: int, cookie: int) -> Iterator[PlainEntry]:
        """List a directory as `readdir` does, with plain tuples, which take a third of the time of named ones."""
        directory = self._state.directory(inode)
        self._state.update_atime(directory)
        cookies = directory.cookies
        if cookies is None or cookies.ascends:
            names = directory.children or ()
            if self.recorder is not None:
                self.recorder.record_listing(directory)
            cookies = directory.cookies = downward(cookies, names)
        chunks = self._chunks(directory, cookies, cookie)
        return itertools.chain(self._dots(directory, cookie), itertools.chain.from_iterable(chunks))

    def _dots(self, directory: Inode, cookie: int) -> Iterator[PlainEntry]:
        for dot, name in _DOT_COOKIES:
            if dot > cookie:
                node = directory if dot == 1 else self._state.parent(directory)
                yield name, node.inode, node.mode, dot

    def _chunks(
        self, directory: Inode, names_by_cookie: DirectoryCookies, cookie: int
    ) -> Iterator[Iterator[PlainEntry]]:
        children = directory.children
        assert children is not None
        for cookies, names in names_by_cookie.chunks(cookie):
            numbers = [children[name] for name in names]
            yield zip(names, numbers, self._state.modes(numbers), cookies, strict=True)

    # -- making and removing -----------------------------------------------------------------------
    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Inode:
        if self.repeats and (done := self._repeated()) is not None:
            return self._looked_up(done)
        kind = mode & TYPE_MASK or _REGULAR
        if kind in _NOT_FOR_MKNOD:
            raise os_error(errno.EPERM)
        directory = self._room_for(parent, name)
        node = self._new(directory, kind | (mode & 0o7777), caller)
        if kind in _DEVICES:
            node.rdev = rdev
        self._enter(directory, name, node)
        if self.recorder is not None:
            self.recorder.made(parent, name, node)
        return node

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Inode:
        if self.repeats and (done := self._repeated()) is not None:
            return self._looked_up(done)
        directory = self._room_for(parent, name, is_directory=True)
        inherited = directory.mode & stat.S_ISGID
        node = self._new(directory, stat.S_IFDIR | (mode & 0o7777) | inherited, caller)
        self._enter(directory, name, node)
        if self.recorder is not None:
            self.recorder.made(parent, name, node)
        return node

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Inode:
        if self.repeats and (done := self._repeated()) is not None:
            return self._looked_up(done)
        if not target:
            raise os_error(errno.ENOENT)
        if len(target) > SYMLINK_MAX:
            raise os_error(errno.ENAMETOOLONG)
        directory = self._room_for(parent, name, length=len(target))
        node = self._state.create(stat.S_IFLNK | 0o777, caller.uid, _group(directory, caller))
        self._state.set_target(node, target)
        self._enter(directory, name, node)
        if self.recorder is not None:
            self.recorder.made(parent, name, node)
        return node

    def tmpfile(self, parent: int, mode: int, caller: Caller) -> Inode:
        if self.repeats and (done := self._repeated()) is not None:
            return self._looked_up(done)
        if self._state.read_only:
            raise os_error(errno.EROFS)
        directory = self._state.directory(parent)
        self._limits.check_room(0, 1)
        self._limits.require(SLACK_BYTES)
        if self.recorder is not None:
            self.recorder.begin(2 * xattrs.content_bytes(directory.xattrs))  # of ACLs; the directory does not change
        node = self._new(directory, stat.S_IFREG | (mode & 0o7777), caller)
        self._state.lookups[node.inode] = 1
        self._state.orphans.add(node.inode)
        if self.recorder is not None:
            self.recorder.made(None, b"", node)
        return node

    def link(self, inode: int, parent: int, name: bytes) -> Inode:
        if self.repeats and (done := self._repeated()) is not None:
            return self._looked_up(done)
        node = self.getattr(inode)
        if node.is_dir:
            raise os_error(errno.EPERM)
        directory = self._room_for(parent, name, inodes=0)
        if self.recorder is not None:
            self.recorder.begin(0, node)
        node = self._limits.changeable(node)
        node.ctime_ns = self._clock()
        self._enter(directory, name, node)
        if self.recorder is not None:
            self.recorder.linked(parent, name, node)
        return node

    def unlink(self, parent: int, name: bytes) -> None:
        if self.repeats and self._repeated() is not None:
            return
        directory, node = self._victim(parent, name)
        if node.children is not None:
            raise os_error(errno.EISDIR, shown(name))
        self._remove(directory, name, node)

    def rmdir(self, parent: int, name: bytes) -> None:
        if self.repeats and self._repeated() is not None:
            return
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
    def rename(  # noqa: C901 -- the checks of rename(2), in its order
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int = 0,
        caller: Caller = SUPERUSER,
    ) -> None:
        if self.repeats and self._repeated() is not None:
            return
        if flags and (flags & ~_RENAME_FLAGS or (flags & RENAME_EXCHANGE and flags != RENAME_EXCHANGE)):
            raise os_error(errno.EINVAL)
        source, node = self._victim(parent, name)
        target = self._state.directory(new_parent)
        _check_name(new_name)
        assert target.children is not None
        number = target.children.get(new_name)
        victim = self._inodes[number] if number is not None else None
        recorder = self.recorder
        if recorder is not None:
            recorder.begin(0, source, target, node, victim)
        if flags & RENAME_EXCHANGE:
            if victim is None:
                raise not_found(new_name)
            self._check_not_below(node, target)
            self._check_not_below(victim, source)
            self._require_versions(node, victim, source, target)
            self._exchange(source, name, node, target, new_name, victim)
            if recorder is not None:
                recorder.renamed(parent, name, new_parent, new_name, node, victim)
            return
        if victim is not None and flags & RENAME_NOREPLACE:
            raise os_error(errno.EEXIST, shown(new_name))
        if victim is node and target.nlink:
            return  # two names of one file: rename(2) does nothing
        self._check_target(node, target, victim, new_name)
        if flags & RENAME_WHITEOUT and victim is None:
            self._limits.check_room(0, 1)
        if self._ledger.metadata > self._limits.checked_metadata or self._state.log.newest is not None:
            self._require_versions(node, source, target)
        self._move(source, name, node, target, new_name, victim)
        if flags & RENAME_WHITEOUT:
            self._leave_whiteout(parent, name, caller)
        if recorder is not None:
            recorder.renamed(parent, name, new_parent, new_name, node, victim)

    def _require_versions(self, *nodes: Inode) -> None:
        """Raise ENOSPC if there is no memory for the old versions of `nodes` and for a longer name."""
        state = self._state
        if self._ledger.metadata > self._limits.checked_metadata:
            self._limits.check_entry()
        if state.log.newest is None:
            return
        needed = SLACK_BYTES
        needed += sum(version_bytes(node) for node in nodes if node.epoch != state.epoch)
        self._limits.require(needed)

    def _check_not_below(self, node: Inode, directory: Inode) -> None:
        if node.children is None:
            return
        while directory.inode != ROOT_INODE:
            if directory is node:
                raise os_error(errno.EINVAL)
            directory = self._state.parent(directory)

    def _check_target(self, node: Inode, target: Inode, victim: Inode | None, name: bytes) -> None:
        """Check that `node` can get `name`, which `victim` has, in `target`."""
        if target.nlink == 0:
            raise not_found(name)
        if node.children is not None:
            self._check_not_below(node, target)
        if victim is None:
            return
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
        state.move_entry(source, name, target, new_name, node, victim)
        if victim is not None:
            victim.ctime_ns = now
            state.release(victim)
        _modified(source, now)
        if target is not source:
            _modified(target, now)
        node.ctime_ns = now

    def _leave_whiteout(self, parent: int, name: bytes, caller: Caller) -> None:
        """Make a whiteout as overlayfs reads it: a character device 0:0, which needs no privilege."""
        directory = self._state.directory(parent)
        node = self._enter(directory, name, self._new(directory, stat.S_IFCHR, caller))
        del self._state.lookups[node.inode]

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
        """Return the directory and the inode that `name` in it stands for; both are about to change."""
        if self._state.read_only:
            raise os_error(errno.EROFS)
        directory = self._state.directory(parent)
        try:
            return directory, self._inodes[directory.children[name]]  # type: ignore[index]
        except KeyError:
            raise not_found(name) from None

    def _room_for(
        self, parent: int, name: bytes, inodes: int = 1, *, length: int = 0, is_directory: bool = False
    ) -> Inode:
        """Return the directory after checking that `name` can be made in it; `length`: of a symlink's target."""
        if self._state.read_only:
            raise os_error(errno.EROFS)
        directory = self._inodes.get(parent)
        if directory is None or directory.children is None:
            directory = self._state.directory(parent)
            assert directory.children is not None
        if len(name) > NAME_MAX or not name or _SLASH in name or 0 in name:
            _check_name(name)
        if name in directory.children or name in _DOTS:
            raise os_error(errno.EEXIST, shown(name))
        if directory.nlink == 0:
            raise not_found(name)  # the directory was removed while it was open
        limits = self._limits
        if limits.max_inodes is not None:
            limits.check_room(0, inodes)
        if self._ledger.metadata > limits.checked_metadata:
            limits.check_entry()
        if self._state.check_new_name is not None:
            self._state.check_new_name(directory, name, is_directory)
        if self.recorder is not None:
            self.recorder.begin(length, directory)
        return directory

    def _new(self, directory: Inode, mode: int, caller: Caller) -> Inode:
        """Make an inode without a name; the umask, or the default ACL instead of it, limits its mode."""
        if directory.xattrs is None:
            uid, gid, umask, _ = caller
            return self._state.create(mode & ~umask, uid, directory.gid if directory.mode & _SET_GID else gid)
        mode, acls = xattrs.inherited(directory.xattrs, mode, caller.umask)
        node = self._state.create(mode, caller.uid, _group(directory, caller))
        self._ledger.set_xattrs(node, acls)
        return node

    def _enter(self, directory: Inode, name: bytes, node: Inode) -> Inode:
        """Give `node` (owned) a name.  The directory's times become the ctime of `node`, as on tmpfs."""
        state = self._state
        if directory.epoch != state.epoch:
            directory = state.own(directory)
        state.add_entry(directory, name, node)
        directory.mtime_ns = directory.ctime_ns = node.ctime_ns
        lookups = state.lookups
        lookups[node.inode] = lookups.get(node.inode, 0) + 1
        return node

    def _remove(self, directory: Inode, name: bytes, node: Inode) -> None:
        state, recorder = self._state, self.recorder
        if recorder is not None:
            recorder.begin(0, directory, node, removes=True)
        epoch = state.epoch
        if directory.epoch != epoch:
            directory = state.own(directory)
        if node.epoch != epoch:
            node = state.own(node)
        state.drop_entry(directory, name, node)
        directory.mtime_ns = directory.ctime_ns = node.ctime_ns = self._clock()
        if node.nlink == 0 and node.inode not in state.lookups:
            state.release(node)
        if recorder is not None:
            recorder.removed(directory, name, node)


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise os_error(errno.ENAMETOOLONG)
    if not name or _SLASH in name or 0 in name:
        raise os_error(errno.EINVAL, shown(name))


def _group(directory: Inode, caller: Caller) -> int:
    """Return the group of an inode that `caller` makes in `directory`."""
    return directory.gid if directory.mode & _SET_GID else caller.gid


def _modified(directory: Inode, now_ns: int) -> None:
    directory.mtime_ns = directory.ctime_ns = now_ns


def not_found(name: bytes) -> OSError:
    """Return the error for an entry that does not exist, or whose name is too long to exist."""
    return os_error(errno.ENAMETOOLONG if len(name) > NAME_MAX else errno.ENOENT, shown(name))


def shown(name: bytes) -> str:
    """Return a name as an error message can show it."""
    return name.decode("utf-8", "backslashreplace")
