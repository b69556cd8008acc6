"""A simulated kernel that has cached all there was, and is told only what a `CacheInvalidation` says."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.backends.memory import MemoryVolume
from protocol.volume import Attributes
from protocol.volume_extensions import CacheInvalidation

Shown = tuple[int, ...]


def shown(a: Attributes) -> Shown:
    return (a.mode, a.nlink, a.uid, a.gid, a.rdev, a.size, a.blocks, a.mtime_ns, a.ctime_ns)


@dataclass
class Cached:
    generation: int
    attributes: Shown
    content: bytes | None
    names: dict[bytes, int] = field(default_factory=dict)  # 0: a negative dentry


def _look(volume: MemoryVolume, number: int, names: Iterable[bytes]) -> Cached:
    inode = volume.getattr(number)
    children = inode.children or {}
    content = bytes(volume.read(number, 0, inode.size)) if inode.is_file else inode.target
    dentries = {name: children.get(name, 0) for name in {*names, *children}} if inode.is_dir else {}
    return Cached(inode.generation, shown(inode), content, dentries)


class KernelCache:
    """Every inode, name and page of `volume`, cached as they are now; also that each of `names` is missing."""

    def __init__(self, volume: MemoryVolume, numbers: Iterable[int], names: Iterable[bytes]) -> None:
        self._names = tuple(names)
        self._cached = {number: _look(volume, number, self._names) for number in numbers}

    def check(self, volume: MemoryVolume, coherence: CacheInvalidation, numbers: Iterable[int]) -> None:
        """What `coherence` does not name must be as it was cached, and what it names must be true."""
        now = {number: _look(volume, number, self._names) for number in numbers}
        named = {(change.parent, change.name): change for change in coherence.entries}
        assert len(named) == len(coherence.entries), "a name twice"
        stale_attributes = {change.inode for change in coherence.inodes}
        stale_pages = {change.inode for change in coherence.inodes if change.content}
        for change in coherence.entries:  # see vfsd.kernel.invalidation: the inodes of a changed name, too
            stale_attributes |= {change.parent, change.old, change.new}
        for number, old in self._cached.items():
            new = now.get(number)
            if new is not None and new.generation != old.generation:
                assert old.attributes[1] == 0, "only what was removed comes back as another generation"
                continue  # the kernel makes another inode of it
            if new is not None and stat.S_ISDIR(new.attributes[0]):
                assert old.attributes[1] or not new.attributes[1], "a removed directory is dead to a kernel"
            for name, target in old.names.items():
                current = new.names.get(name, 0) if new is not None else 0
                change = named.get((number, name))
                if change is None:
                    assert current == target, f"{name!r} in {number}: {target} became {current} untold"
                else:
                    assert (change.old, change.new) == (target, current)
            if new is None:
                continue
            if number not in stale_attributes:
                assert new.attributes == old.attributes, f"attributes of {number}"
            if number not in stale_pages:
                assert new.content == old.content, f"content of {number}"
        for parent, _, was, becomes in coherence.entries:
            assert was != becomes, "no change"
            assert {parent, was, becomes} - {0} <= coherence.modes.keys()
            directory = now.get(parent)
            assert parent in coherence.paths or directory is None or directory.attributes[1] == 0
        for change in coherence.inodes:
            assert change.inode in coherence.modes
            assert (change.inode in coherence.paths) == (now[change.inode].attributes[1] > 0)
