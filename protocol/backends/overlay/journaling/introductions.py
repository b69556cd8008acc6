"""Introductions: the effects that a journal needs before it refers to an inode of the lower layer.

The journal records changes, and what they are based on: the inode as it was loaded, the directories above it, and, of a
directory that changes, its entries.  So a replay reads nothing from the lower layer.

Threading: under the state's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.journaling.image import listing_at
from protocol.backends.overlay.content import LowerContent
from protocol.backends.overlay.inode import OverlayInode
from protocol.backends.overlay.journaling.values import KeptValue, LowerValue
from protocol.backends.overlay.lower import identity_record
from protocol.journal import effects
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from protocol.backends.memory.history.undo import PreInodes, PreNames
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.lower import Identity, LowerFile
    from protocol.backends.overlay.state import OverlayState

_KEPT_BYTES: Final = 1 << 20  # in one effect


class Introductions:
    """Introduces inodes as they were at the moment that the pre-images `inodes` and `names` lead back to."""

    def __init__(self, state: OverlayState, inodes: PreInodes, names: PreNames) -> None:
        self._state = state
        self._inodes = inodes
        self._names = names
        self._recorded: list[tuple[int, LowerFile | None]] = []
        self._listed: list[int] = []

    def of(self, number: int, *, listing: bool) -> Iterator[bytes]:
        """Yield the effects that are missing for inode `number`; with its entries if `listing`."""
        state = self._state
        todo = [number]
        while todo:
            inode = self._version(todo.pop())
            if not isinstance(inode, OverlayInode) or self._is_recorded(inode):
                continue
            self._recorded.append((inode.inode, state.recorded.get(inode.inode)))
            state.recorded[inode.inode] = inode.lower
            links = [link for link in inode.links if isinstance(self._version(link[0]), OverlayInode)]
            xattrs = None if inode.xattrs is None else list(inode.xattrs.items())
            value = LowerValue(inode.lower.record, effects.inode(inode), links, xattrs, inode.target)
            yield effects.of_overlay(effects.LOWER, inode.inode, value)
            todo += (directory for directory, _ in links)
        if listing and number not in state.listed:
            yield from self.listing(number)

    def listing(self, number: int) -> Iterator[bytes]:
        """Yield the effect with the entries of `number`, if it is a directory of the lower layer."""
        inode = self._version(number)
        if isinstance(inode, OverlayInode) and inode.children is not None:
            entries = listing_at(inode, self._names)
            self._listed.append(number)
            self._state.listed.add(number)
            rows = [(name, child, self._kind(child)) for name, child in entries.items()]
            yield effects.of_overlay(effects.LISTING, number, rows)

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of the listed directories, if a program has read their entries."""
        for number in self._listed:
            live = self._state.table.loaded(number)
            if live is not None and live.cookies is not None:
                yield effects.cookies(number, live.cookies)

    def withdraw(self) -> None:
        """Forget that these effects are in the journal."""
        for number, file in reversed(self._recorded):
            if file is None:
                del self._state.recorded[number]
            else:
                self._state.recorded[number] = file
        self._state.listed.difference_update(self._listed)

    def _version(self, number: int) -> Inode | None:
        return self._inodes[number] if number in self._inodes else self._state.table.get(number)

    def _is_recorded(self, inode: OverlayInode) -> bool:
        """Whether the journal has the inode; if it has not changed yet, with the lower file that it follows now."""
        file = self._state.recorded.get(inode.inode)
        if file is None:
            return False
        return file is inode.lower or file.record == inode.lower.record or not inode.follows(inode.lower.identity)

    def _kind(self, number: int) -> int:
        version = self._inodes.get(number)
        return (self._state.kind(number) if version is None else version.mode) & TYPE_MASK


def kept(file: LowerFile) -> Iterator[bytes]:
    """Yield the effects with the content of a file that an apply replaced."""
    for offset in range(0, max(1, file.size), _KEPT_BYTES):
        data = file.read(offset, min(_KEPT_BYTES, file.size - offset))
        yield effects.of_overlay(effects.KEPT, 0, KeptValue(file.record, offset, data))


def kept_files(state: OverlayState) -> list[LowerFile]:
    """Return the files that an apply replaced and whose content the state still needs."""
    files: dict[int, LowerFile] = {}
    for number in set(state.table).union(*(epoch.inodes for epoch in state.log.epochs())):
        for version in state.versions(number):
            if isinstance(version.content, LowerContent) and version.content.lower.kept is not None:
                files[id(version.content.lower)] = version.content.lower
    return list(files.values())


def identities_effect(identities: Mapping[bytes, Identity | None]) -> bytes:
    """Return the effect with the identities of the files that applies wrote."""
    rows = [(path, None if found is None else identity_record(found)) for path, found in identities.items()]
    return effects.of_overlay(effects.IDENTITIES, 0, rows)


def renewed_effect(renewed: Mapping[tuple[int, int], Identity]) -> bytes:
    """Return the effect of other ctimes of files below."""
    rows = [(*key, identity_record(found)) for key, found in renewed.items()]
    return effects.of_overlay(effects.RENEWED, 0, rows)
