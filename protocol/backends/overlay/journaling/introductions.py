"""The effects by which a journal, or an image, describes the lower layer, so that a replay reads nothing from it.

The journal records changes, and their basis: before it refers to an inode of the lower layer, it introduces the inode
as it was loaded, the directories above it, and, of a directory that changes, its entries.

The values in the effects of overlays (`protocol.journal.effects`):

    LOWER       number, `LowerValue`
    LISTING     number of the directory, `Listing`
    KIND        number, type bits of the mode, or 0
    FOLLOWED    number, `FileRecord`
    CONTENT     number, `FileRecord`, or None for content that is empty
    VISIBLE     number, `LowerContent.visible`
    KEPT        0, `KeptValue`
    BASE        serial of the epoch that begins with the base, None
    IDENTITIES  0, [(path, `IdentityRecord` or None)]
    RENEWED     0, [(device, inode, `IdentityRecord`)]
    DEVICE      the device number, None

Threading: under the state's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from protocol.backends.memory.journaling.changes import Image, inode_details, listing_at
from protocol.backends.overlay.inode import LowerContent, OverlayInode
from protocol.backends.overlay.lower import FileRecord, IdentityRecord, identity_record
from protocol.journal import effects
from protocol.tree import TYPE_MASK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames
    from protocol.backends.memory.inode import Inode
    from protocol.backends.overlay.known_inodes import KnownInodes
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


Listing: TypeAlias = list[tuple[bytes, int, int]]
"""Name, inode number and type bits of each entry."""
Visible: TypeAlias = tuple[int, tuple[int, ...]]
Identities: TypeAlias = list[tuple[bytes, IdentityRecord | None]]
Renewed: TypeAlias = list[tuple[int, int, IdentityRecord]]


class LowerValue(NamedTuple):
    """An inode of the lower layer.  `attributes` is an INODE effect."""

    file: FileRecord
    attributes: bytes
    links: list[tuple[int, bytes]]
    xattrs: list[tuple[bytes, bytes]] | None
    target: bytes | None


class KeptValue(NamedTuple):
    """A part of the content of a file; the parts come in order."""

    file: FileRecord
    offset: int
    data: bytes


class OverlayImage(Image):
    """The image of one state, whose base is the beginning of `base`.

    It begins with the inodes of the lower layer that changed, as they were in the oldest state, and records which state
    is the base.

    `known`: in an image for another process, its records follow.
    """

    def __init__(
        self,
        state: OverlayState,
        notes: Mapping[str, bytes],
        base: Epoch,
        identities: Mapping[bytes, Identity | None],
    ) -> None:
        super().__init__(state, notes)
        self._overlay = state
        self._base = base
        self._identities = identities
        self.known: KnownInodes | None = None

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of directories whose names the image has."""
        for number, live in self._overlay.table.items():
            is_listed = not isinstance(live, OverlayInode) or number in self._overlay.listed
            if live.cookies is not None and is_listed:
                yield effects.cookies(number, live.cookies)

    def effects(self) -> Iterator[bytes]:
        yield effects.of_overlay(effects.DEVICE, self._overlay.device, None)
        for file in kept_files(self._overlay):
            yield from kept(file)
        yield from super().effects()
        yield identities_effect(self._identities)
        for record in () if self.known is None else self.known.records():
            yield effects.of_overlay(effects.KNOWN, 0, record)

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `pieces` unchecked: an entry may lead to an inode that is only below."""
        return pieces

    def begin_step(self, epoch: Epoch) -> Iterator[bytes]:
        if epoch is self._base:
            yield effects.of_overlay(effects.BASE, epoch.serial, None)

    def beginning(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        state = self._overlay
        changed = self._changed()
        recorded, listed = [*state.recorded], state.listed.copy()
        # The image replaces what the journal has, so it introduces everything again.
        state.recorded.clear()
        state.listed.clear()
        introductions = Introductions(state, inodes, names)
        for number in dict.fromkeys((*recorded, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.of(number, listing=False)
        own = {number: None if isinstance(inode, OverlayInode) else inode for number, inode in inodes.items()}
        yield from self.first_inodes(own)  # before the listings, which refer to them
        for number in dict.fromkeys((*listed, *changed)):
            if inodes.get(number) is not None:
                yield from introductions.listing(number)
        for number in list(state.recorded):
            inode = inodes.get(number)
            if isinstance(inode, OverlayInode):
                yield from _content(inode)
        yield from self.first_names(own, names)

    def introduce(self) -> None:
        """Have the state note what `effects` will introduce, in this process, which does not write the image."""
        inodes, names = self.oldest()
        introductions = Introductions(self._overlay, inodes, names)
        changed = [number for number in self._changed() if inodes.get(number) is not None]
        for number in changed:
            deque(introductions.of(number, listing=False), maxlen=0)
        for number in changed:
            deque(introductions.listing(number), maxlen=0)

    def _changed(self) -> list[int]:
        """Return the inodes of the lower layer that were ever changed."""
        state = self._overlay
        numbers = {number for number, inode in dict.items(state.table) if inode.epoch}
        numbers = numbers.union(*(epoch.inodes for epoch in state.log.epochs()))
        found = []
        for number in sorted(numbers):
            versions = [each for each in state.versions(number) if isinstance(each, OverlayInode)]
            if any(each.epoch for each in versions):
                found.append(number)
        return found


def _content(inode: OverlayInode) -> Iterator[bytes]:
    """Yield how the content of the oldest version differs from its lower file."""
    content = inode.content
    if not inode.is_file:
        return
    if isinstance(content, LowerContent) and content.is_pristine and content.lower is inode.lower:
        return
    before = OverlayInode(inode.inode, inode.mode, 0, 0, 0, 0)
    before.lower, before.xattrs, before.target = inode.lower, inode.xattrs, inode.target
    before.content = LowerContent(inode.lower)
    yield from inode_details(before, inode, {})
