"""Restores invalidate only what the kernel knows, and nothing that the kernel caches is stale afterwards."""

from __future__ import annotations

import random
import stat

import pytest
import trio

from protocol.backends.memory import MemoryVolume
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, AttributeChanges, Attributes, Caller
from protocol.volume_extensions import CacheInvalidation
from vfsd.kernel.invalidation import invalidate_kernel_caches, known_inodes

ME = Caller(0, 0)
NAMES = (b"a", b"b", b"c")

Shown = tuple[int, ...]


def shown(found: Attributes) -> Shown:
    return (found.mode, found.nlink, found.size, found.mtime_ns, found.ctime_ns)


class Kernel:
    """Caches names, absences, listings, attributes and content as Linux does; also an engine that takes notifications.

    It holds an inode from the first lookup to the forget.  A name keeps its inode and its directory from being
    forgotten.
    """

    def __init__(self, volume: MemoryVolume) -> None:
        self.volume = volume
        self.lookups = {ROOT_INODE: 0}
        self.names: dict[tuple[int, bytes], int] = {}  # 0: absent
        self.attributes: dict[int, Shown] = {}
        self.content: dict[int, bytes] = {}  # for a directory, its listing
        self.notifications = 0

    # -- as an engine ----------------------------------------------------------------------------
    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.notifications += 1
        self.names.pop((parent, name), None)

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        self.notifications += 1
        self.attributes.pop(inode, None)
        if content:
            self.content.pop(inode, None)

    # -- as a client of the volume ---------------------------------------------------------------
    def look_up(self, parent: int, name: bytes) -> int:
        if (parent, name) not in self.names:
            try:
                found = self.volume.lookup(parent, name)
            except OSError:
                self.names[parent, name] = 0
            else:
                self.take(parent, name, found)
        return self.names[parent, name]

    def take(self, parent: int, name: bytes, found: Attributes) -> None:
        self.lookups[found.inode] = self.lookups.get(found.inode, 0) + 1
        self.names[parent, name] = found.inode
        self.attributes[found.inode] = shown(found)

    def read(self, inode: int) -> None:
        self.attributes[inode] = shown(self.volume.getattr(inode))
        self.content[inode] = content_of(self.volume, inode)

    def forget(self, inode: int) -> None:
        if inode != ROOT_INODE and not any(inode in (parent, child) for (parent, _), child in self.names.items()):
            self.attributes.pop(inode, None)
            self.content.pop(inode, None)
            self.volume.forget(inode, self.lookups.pop(inode))

    def drop(self, parent: int, name: bytes) -> None:
        """Reclaim one name and, if nothing needs them any more, its inode and its directory."""
        child = self.names[parent, name]
        if child and any(directory == child for directory, _ in self.names):
            return
        del self.names[parent, name]
        for inode in {child, parent} - {0}:
            self.forget(inode)

    def changed(self, *inodes: int) -> None:
        """Forget what the kernel invalidates itself when it has sent a change."""
        for inode in inodes:
            self.attributes.pop(inode, None)
            self.content.pop(inode, None)

    def check(self) -> None:
        for (parent, name), child in self.names.items():
            if parent in self.attributes or self.volume.getattr(parent).nlink:
                assert (self.volume.getattr(parent).children or {}).get(name, 0) == child
        for inode, attributes in self.attributes.items():
            assert shown(self.volume.getattr(inode)) == attributes
        for inode, content in self.content.items():
            assert content_of(self.volume, inode) == content


def content_of(volume: MemoryVolume, number: int) -> bytes:
    inode = volume.getattr(number)
    if inode.is_dir:
        return b"/".join(sorted(inode.children or {}))
    return bytes(volume.read(number, 0, inode.size))


class Program:
    """Random calls through the kernel."""

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.kernel = kernel
        self.volume = kernel.volume
        self.random = random.Random(seed)
        self.snapshots: list[str] = []

    def directory(self) -> int:
        """Walk down to a directory."""
        number = ROOT_INODE
        while self.random.random() < 0.6:
            child = self.kernel.look_up(number, self.random.choice(NAMES))
            if not child or not stat.S_ISDIR(self.volume.getattr(child).mode):
                break
            number = child
        return number

    def step(self) -> None:
        parent, name = self.directory(), self.random.choice(NAMES)
        kernel, volume = self.kernel, self.volume
        child = kernel.look_up(parent, name)
        action = self.random.choice(["make", "make", "make", "read", "write", "remove", "rename", "reclaim", "reclaim"])
        if action == "reclaim":
            for key in self.random.sample(list(kernel.names), len(kernel.names) // 2):
                if key in kernel.names:
                    kernel.drop(*key)
        elif action == "rename":
            self.rename(parent, name, child)
        elif action == "make" and not child:
            make = volume.mkdir if self.random.random() < 0.5 else volume.mknod
            arguments = (0o755, ME) if make == volume.mkdir else (stat.S_IFREG | 0o644, 0, ME)
            kernel.take(parent, name, make(parent, name, *arguments))
            kernel.changed(parent)
        elif action == "read" and child:
            kernel.read(child)
            kernel.read(parent)
        elif action == "write" and child and stat.S_ISREG(volume.getattr(child).mode):
            volume.write(child, 0, self.random.randbytes(3))
            kernel.changed(child)
        elif action == "write" and child:
            kernel.attributes[child] = shown(
                volume.setattr(child, AttributeChanges(mode=self.random.choice([448, 493])))
            )
        elif action == "remove" and child:
            self.remove(parent, name, child)

    def remove(self, parent: int, name: bytes, child: int) -> None:
        is_directory = stat.S_ISDIR(self.volume.getattr(child).mode)
        try:
            (self.volume.rmdir if is_directory else self.volume.unlink)(parent, name)
        except OSError:
            return  # not empty
        self.kernel.names[parent, name] = 0
        self.kernel.changed(parent, child)
        if is_directory:
            for key in [key for key in self.kernel.names if key[0] == child]:
                del self.kernel.names[key]

    def rename(self, parent: int, name: bytes, child: int) -> None:
        target, new_name = self.directory(), self.random.choice(NAMES)
        other = self.kernel.look_up(target, new_name)
        try:
            self.volume.rename(parent, name, target, new_name, RENAME_EXCHANGE, ME)
        except OSError:
            return
        self.kernel.names[parent, name], self.kernel.names[target, new_name] = other, child
        self.kernel.changed(parent, target, child, other)

    def restore(self) -> None:
        name = self.random.choice(self.snapshots)
        with_paths = [self.random.choice(NAMES)] if self.random.random() < 0.3 else []
        self.volume.take_snapshot("safety")
        invalidation = self.volume.restore_snapshot(name, with_paths)
        self.volume.drop_snapshot("safety")
        trio.run(invalidate_kernel_caches, self.kernel, invalidation, known_inodes(self.volume, invalidation))
        self.kernel.check()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_the_kernel_caches_is_stale_after_a_restore(seed: int) -> None:
    volume = MemoryVolume()
    kernel = Kernel(volume)
    program = Program(kernel, seed)
    for round_number in range(12):
        for _ in range(25):
            program.step()
            kernel.check()
        if round_number % 3 == 0:
            program.snapshots.append(f"s{round_number}")
            volume.take_snapshot(program.snapshots[-1])
        else:
            program.restore()
    volume.check_invariants()


def test_a_removed_tree_that_was_never_looked_up_needs_one_name_and_the_directory() -> None:
    volume = MemoryVolume()
    kernel = Kernel(volume)
    volume.take_snapshot("empty")
    top = volume.mkdir(ROOT_INODE, b"top", 0o755, ME).inode
    for number in range(100):
        volume.forget(volume.mknod(top, b"%d" % number, stat.S_IFREG | 0o644, 0, ME).inode, 1)
    volume.forget(top, 1)
    invalidation: CacheInvalidation = volume.restore_snapshot("empty")
    assert len(invalidation.entries) >= 1
    trio.run(invalidate_kernel_caches, kernel, invalidation, known_inodes(volume, invalidation))
    assert kernel.notifications == 2
