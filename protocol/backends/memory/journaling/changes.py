"""The effects of all changes since the beginning of an epoch, from its pre-images.

Versions share blocks, and a block that versions share is replaced and never changed (see `content`).  So the blocks
that changed are those that are another object than in the pre-image.  A block that a restore took from a snapshot is
recorded as a reference to that snapshot: a restore costs as little on disk as in memory, and sharing survives a replay.

A reference names a snapshot and an inode, not an epoch: which epoch holds a version depends on when views were open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from protocol.backends.memory.blocks import SparseBlock
from protocol.journal import effects

if TYPE_CHECKING:
    from protocol.backends.memory.blocks import Block
    from protocol.backends.memory.history.undo import Epoch
    from protocol.backends.memory.inode import Inode
    from protocol.backends.memory.journaling.recorded_ahead import RecordedAhead
    from protocol.backends.memory.state import MemoryState

Source = tuple[int, int, int]  # the serial of a snapshot, the number of an inode in it, the index of a block


def changes_since(state: MemoryState, epoch: Epoch, ahead: RecordedAhead) -> Iterator[bytes]:
    """Yield the effects that lead from the beginning of `epoch`, the newest, to the live state, one by one.

    `ahead`: what the journal has already.
    Inodes come first, then names, then inodes that are gone, so each effect refers to something that exists.
    """
    recorded = ahead.inodes_of(epoch.inodes)
    if recorded:
        yield from ahead.inode_effects()
    yield from _changed_inodes(state, epoch, ahead, recorded)
    if recorded:
        yield from ahead.entry_effects()
    yield from _changed_names(state, epoch, recorded)
    for number in list(epoch.inodes):
        if state.inodes.get(number) is None:
            yield effects.free(number)


def _changed_inodes(
    state: MemoryState, epoch: Epoch, ahead: RecordedAhead, recorded: Collection[int]
) -> Iterator[bytes]:
    for number, before in list(epoch.inodes.items()):
        live = state.inodes.get(number)
        if live is None:
            continue
        if number in recorded:
            if number in ahead.tops:
                yield effects.inode(live)
            continue
        yield effects.inode(live)
        if before is None:
            yield effects.reset(number)
        yield from inode_details(before, live, functools.partial(_sources, state, epoch, number), ahead)


def _changed_names(state: MemoryState, epoch: Epoch, recorded: Collection[int]) -> Iterator[bytes]:
    for number, before in list(epoch.inodes.items()):
        live = state.inodes.get(number)
        if before is None and live is not None and live.children is not None and number not in recorded:
            for name, child in live.children.items():
                yield effects.entry(number, name, child)
    for directory, names in epoch.names.items():
        live = state.inodes.get(directory)
        if directory in epoch.inodes and epoch.inodes[directory] is None and live is not None:
            continue  # listed above
        children = live.children if live is not None and live.children is not None else {}
        for name in names:
            yield effects.entry(directory, name, children.get(name, 0))


def inode_details(
    before: Inode | None,
    now: Inode,
    sources: Mapping[int, Source] | Callable[[], Mapping[int, Source]],
    ahead: RecordedAhead | None = None,
) -> Iterator[bytes]:
    """Yield the effects from version `before` (None: nothing) to `now`, other than attributes and entries.

    `sources`: where snapshots show blocks, by the identity of the block; or a function that returns it.
    """
    number = now.inode
    followed = now.followed
    if followed is not None and (before is None or before.followed != followed):
        yield effects.of_overlay(effects.FOLLOWED, number, followed)
    if now.xattrs is not (None if before is None else before.xattrs):
        yield effects.xattrs(number, now.xattrs)
    if now.target is not None and (before is None or before.target != now.target):
        yield effects.target(number, now.target)
    old = before.content if before is not None else None
    content = now.content
    if content is old:
        return
    source, old_source = (None if each is None else each.source for each in (content, old))
    if source != old_source:
        yield effects.of_overlay(effects.CONTENT, number, source)
        old = None
    visible = None if content is None else content.visible
    if visible is not None and (old is None or old.visible != visible):
        yield effects.of_overlay(effects.VISIBLE, number, visible)
    old_blocks = old.blocks if old is not None else {}
    blocks = content.blocks if content is not None else {}
    for index in old_blocks.keys() - blocks.keys():
        yield effects.no_block(number, index)
    changed = {index: block for index, block in blocks.items() if old_blocks.get(index) is not block}
    if changed:
        yield from _changed_blocks(number, changed, sources, ahead)
    reserved = content.reserved if content is not None else ()
    if reserved != (old.reserved if old is not None else ()):
        yield effects.reservations(number, reserved)


def _changed_blocks(
    number: int,
    changed: Mapping[int, Block],
    sources: Mapping[int, Source] | Callable[[], Mapping[int, Source]],
    ahead: RecordedAhead | None,
) -> Iterator[bytes]:
    """Yield the effects that set blocks: by a reference to where the journal has them, or with their content."""
    if ahead is not None:
        left = {}
        for index, block in changed.items():
            kept = ahead.take(index, block)
            if kept is None:
                left[index] = block
            else:
                yield effects.stored_block(number, index, kept)
        changed = left
    if changed and callable(sources):
        sources = sources()
    for index, block in changed.items():
        source = sources.get(id(block)) if isinstance(sources, Mapping) else None
        if source is not None:
            yield effects.shared_block(number, index, *source)
        else:
            yield from whole_block(number, index, block)


def whole_block(number: int, index: int, block: Block) -> Iterator[bytes]:
    """Yield the effect that sets a block."""
    if isinstance(block, SparseBlock):
        yield effects.sparse_block(number, index, block.length, block.pages)
    else:
        yield effects.block(number, index, len(block)) + block


def _sources(state: MemoryState, epoch: Epoch, number: int) -> dict[int, Source]:
    """Return where snapshots show the blocks of inode `number`, by the identity of the block.

    `epoch` is the newest.
    """
    found: dict[int, Source] = {}
    serial: int | None = None  # of the newest snapshot that shows the next version
    for each in state.log.epochs():
        if each.info is not None:
            serial = each.serial
        if number in each.inodes:
            version = each.inodes[number]
            if version is not None and version.content is not None and serial is not None and each is not epoch:
                found.update((id(block), (serial, number, index)) for index, block in version.content.blocks.items())
            if each is not epoch:
                serial = None  # it shows this version, and not the later ones
    return found
