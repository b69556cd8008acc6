"""An image: effects that lead from an empty volume to a state with all its snapshots.

It begins with the state of the oldest epoch, and continues with the changes of each epoch, as the journal itself would.
So a replay needs no code of its own for images, and versions share their blocks after it as before.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.history.undo import Epoch, PreInodes, PreNames, merged
from protocol.backends.memory.journaling.changes import Source, inode_details
from protocol.journal import effects
from protocol.journal.log import Batch

if TYPE_CHECKING:
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.state import MemoryState
    from protocol.journal.log import Log

_PROGRESS_PIECES: Final = 256


def write_image(image: Image, log: Log, progress: Callable[[], None] = lambda: None) -> None:
    """Append `image` to `log` as one batch; call `progress` again and again.

    OSError, EBADMSG if the image could not be replayed: it must not replace the journal.
    """
    batch = Batch(log)
    batch.add(_observed(image.checked(image.effects()), progress))
    batch.end()


def _observed(pieces: Iterator[bytes], progress: Callable[[], None]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        if number % _PROGRESS_PIECES == 0:
            progress()
        yield piece


class _Step:
    """What changed in one epoch: the state at its end."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.inodes: PreInodes = {}  # of the inodes with a pre-image
        self.names: PreNames = {}
        self.listings: dict[int, dict[bytes, int]] = {}  # of the directories that were made


class Image:
    """The image of one state."""

    def __init__(self, state: MemoryState, notes: Mapping[str, bytes]) -> None:
        self._state = state
        self._notes = notes
        self._sources: dict[int, Source] = {}  # of the blocks that a snapshot shows, by identity
        self._touched: dict[int, int] = {}  # inode -> the last step that changed it

    def oldest(self) -> tuple[PreInodes, PreNames]:
        """Return the inodes of the oldest state, and the pre-images of its names."""
        inodes, names = merged(self._state.log.epochs())
        for number, live in self._state.inodes.items():
            inodes.setdefault(number, live)
        return inodes, names

    def effects(self) -> Iterator[bytes]:
        epochs = self._state.log.epochs()
        yield from self.beginning(*self.oldest())
        named = -1  # the newest step that begins with a snapshot
        for at, step in enumerate(self._steps(epochs)):
            if step.epoch.info is not None:
                named = at
                yield effects.snapshot(step.epoch.info)
            yield from self.begin_step(step.epoch)
            yield from self._changes(step, at, named, epochs)
        yield from self.cookies()
        yield effects.next_inode(self._state.next_inode)
        yield effects.invalidated()  # an image is begun when no change is in progress
        for key, value in self._notes.items():
            yield effects.note(key, value)

    def checked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield `pieces`; OSError (EBADMSG) for an entry of, or to, an inode that does not exist at that point.

        Reading a whole image back would take the memory of the state once more, and as long as writing it.
        """
        existing: set[int] = set()
        for piece in pieces:
            code, number, other = effects.subjects(piece)
            if code == effects.INODE:
                existing.add(number)
            elif code == effects.FREE:
                existing.discard(number)
            elif code == effects.ENTRY and (number not in existing or (other and other not in existing)):
                raise OSError(
                    errno.EBADMSG, f"the image has an entry of inode {number} to {other}, and lacks one of them"
                )
            yield piece

    def cookies(self) -> Iterator[bytes]:
        """Yield the cookies of the directories that were listed."""
        for number, live in self._state.inodes.items():
            if live.cookies is not None:
                yield effects.cookies(number, live.cookies)

    def begin_step(self, epoch: Epoch) -> Iterator[bytes]:  # noqa: ARG002
        """Yield what a subclass records of an epoch itself."""
        yield from ()

    def beginning(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        """Yield the effects that make the oldest state, from its inodes and the pre-images of its names."""
        yield from self.first_inodes(inodes)
        yield from self.first_names(inodes, names)

    def first_inodes(self, inodes: PreInodes) -> Iterator[bytes]:
        for inode in inodes.values():
            if inode is not None:
                yield effects.inode(inode)
                yield from inode_details(None, inode, {})

    def first_names(self, inodes: PreInodes, names: PreNames) -> Iterator[bytes]:
        for inode in inodes.values():
            if inode is not None and inode.children is not None:
                for name, number in listing_at(inode, names).items():
                    yield effects.entry(inode.inode, name, number)

    def _steps(self, epochs: list[Epoch]) -> list[_Step]:
        """Return the steps from the oldest state to the live one."""
        steps = []
        later: PreInodes = {}
        later_names: PreNames = {}
        for epoch in reversed(epochs):
            step = _Step(epoch)
            for number, before in epoch.inodes.items():
                after = later[number] if number in later else self._state.inodes.get(number)
                step.inodes[number] = after
                if before is None and after is not None and after.children is not None:
                    step.listings[number] = listing_at(after, later_names)
            for directory, names in epoch.names.items():
                # A directory that does not exist after the epoch has no names then.
                after = self._after(step, later, directory)
                if after is None and epoch.inodes.get(directory) is None:
                    continue  # it was made, or revived, and removed while a view was open: see `MemoryState.release`
                listing = listing_at(after, later_names) if after is not None and after.children is not None else {}
                step.names[directory] = {name: listing.get(name, 0) for name in names}
            later.update(epoch.inodes)
            for directory, names in epoch.names.items():
                later_names[directory] = {**later_names.get(directory, {}), **names}
            steps.append(step)
        return steps[::-1]

    def _after(self, step: _Step, later: PreInodes, number: int) -> Inode | None:
        if number in step.inodes:
            return step.inodes[number]
        return later[number] if number in later else self._state.inodes.get(number)

    def _changes(self, step: _Step, at: int, named: int, epochs: list[Epoch]) -> Iterator[bytes]:
        """Yield the effects of one step."""
        for number, before in step.epoch.inodes.items():
            after = step.inodes[number]
            if before is not None and named > self._touched.get(number, -1):
                self._add_sources(before, epochs[named].serial)
            self._touched[number] = at
            if after is not None:
                yield effects.inode(after)
                if before is None:
                    yield effects.reset(number)
                yield from inode_details(before, after, self._sources)
        for directory, listing in step.listings.items():
            for name, number in listing.items():
                yield effects.entry(directory, name, number)
        for directory, names in step.names.items():
            if directory not in step.listings:
                for name, number in names.items():
                    yield effects.entry(directory, name, number)
        for number, after in step.inodes.items():
            if after is None:
                yield effects.free(number)

    def _add_sources(self, version: Inode, serial: int) -> None:
        """Record the blocks of a version that the snapshot `serial` shows."""
        if version.content is not None:
            for index, block in version.content.blocks.items():
                self._sources.setdefault(id(block), (serial, version.inode, index))


def listing_at(directory: Inode, names: PreNames) -> dict[bytes, int]:
    """Return the entries of a directory at the moment that the pre-images `names` lead back to."""
    assert directory.children is not None
    listing = {**directory.children, **names.get(directory.inode, {})}
    return {name: number for name, number in listing.items() if number}
