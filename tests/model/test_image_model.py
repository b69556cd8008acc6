"""Random histories of directories, snapshots and views: an image at any moment gives the same state and snapshots.

The names and the tree are small, so that directories are often removed and made again between two snapshots, and
while views are open.  There is no model of the state: the live volume is compared with what its image is replayed to.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.inode import Inode
from protocol.tree import Tree, filled
from protocol.volume import RENAME_EXCHANGE, ROOT_INODE, SUPERUSER, AttributeChanges
from tests.support.journals import JournalInMemory, assert_same_volume, facts, replayed
from tests.support.trees import DictTree

FILE = stat.S_IFREG | 0o644
BLOCK = 131072
MEMORY = 400_000  # of a volume with a limit: some files of one block

which = st.integers(0, 7)
names = st.sampled_from((b"a", b"b"))
tags = st.sampled_from(("s1", "s2", "s3"))


def image_of(volume: MemoryVolume) -> list[list[bytes]]:
    """Return an image, as a compaction or an upgrade writes it."""
    journal = JournalInMemory()
    journal.keep(volume)
    batches = journal.batches()
    volume.end_journal()
    return batches


class ImageMachine(RuleBasedStateMachine):
    @initialize(max_memory=st.sampled_from((None, None, MEMORY)))
    def begin(self, max_memory: int | None) -> None:
        self.now = 1_000
        self.volume = MemoryVolume(clock=self.clock, uid=1, gid=2, max_memory=max_memory)
        self.max_memory = max_memory
        self.views: list[tuple[AbstractContextManager[Tree], Tree, list[Any]]] = []
        directory = self.volume.mkdir(ROOT_INODE, b"a", 0o755, SUPERUSER).inode
        self.volume.mknod(directory, b"a", FILE, 0, SUPERUSER)
        self.serial = 0
        self.take_snapshot("s1", automatic=False)

    def clock(self) -> int:
        self.now += 1
        return self.now

    def teardown(self) -> None:
        while getattr(self, "views", None):
            self.close_view(0)
        if hasattr(self, "volume"):
            self.image(goes_on=True)
            self.image(goes_on=False)

    # -- picking -------------------------------------------------------------------------------
    def inodes(self, *, directories: bool) -> list[Inode]:
        """The inodes, or the directories with a name, the youngest first: what is done to one goes on."""
        found = [node for node in self.volume._state.inodes.values() if not directories or (node.is_dir and node.nlink)]
        return sorted(found, key=lambda node: -node.inode)

    def some(self, at: int, *, directories: bool = False) -> Inode:
        found = self.inodes(directories=directories)
        return found[at % len(found)]

    def entries(self) -> list[tuple[int, bytes]]:
        return [
            (node.inode, name) for node in self.inodes(directories=True) for name in reversed(list(node.children or ()))
        ]

    def forget(self, number: int) -> None:
        count = self.volume.lookup_counts().get(number, 0)
        if count and number != ROOT_INODE:
            self.volume.forget(number, count)

    # -- names ---------------------------------------------------------------------------------
    @rule(at=which, name=names, is_directory=st.booleans(), is_held=st.booleans())
    def make(self, at: int, name: bytes, is_directory: bool, is_held: bool) -> None:
        parent = self.some(at, directories=True).inode
        try:
            if is_directory:
                number = self.volume.mkdir(parent, name, 0o755, SUPERUSER).inode
            else:
                number = self.volume.mknod(parent, name, FILE, 0, SUPERUSER).inode
        except OSError:
            return  # it exists, or there is no room
        if not is_held:
            self.forget(number)

    @rule(at=which, is_held=st.booleans())
    @precondition(lambda self: self.entries())
    def remove(self, at: int, is_held: bool) -> None:
        """Remove an entry with everything below it, as rm -r does."""
        entries = self.entries()
        self.remove_below(*entries[at % len(entries)], is_held)

    def remove_below(self, parent: int, name: bytes, is_held: bool) -> None:
        number = self.volume._state.inodes[parent].children[name]  # type: ignore[index]
        node = self.volume._state.inodes[number]
        for each in list(node.children or ()):
            self.remove_below(number, each, is_held)
        (self.volume.rmdir if node.is_dir else self.volume.unlink)(parent, name)
        if not is_held:
            self.forget(number)

    @rule(at=which, name=names, meanwhile=st.sampled_from(("mark", "view", "snapshot")), is_held=st.booleans())
    def unpack_and_remove(self, at: int, name: bytes, meanwhile: str, is_held: bool) -> None:
        """Make a directory with an entry, and remove both; an epoch begins and ends between."""
        parent = self.some(at, directories=True).inode
        try:
            directory = self.volume.mkdir(parent, name, 0o755, SUPERUSER).inode
            self.volume.mkdir(directory, name, 0o755, SUPERUSER)
        except OSError:
            return
        if meanwhile == "mark":
            self.volume.mark()
        elif meanwhile == "view":
            with self.volume.tree():
                pass
        else:
            temporary = self.free_name()
            self.volume.take_snapshot(temporary, kind="safety")
            self.volume.drop_snapshot(temporary)
        self.remove_below(parent, name, is_held)

    @rule(at=which, to=which, name=names, flags=st.sampled_from((0, 0, RENAME_EXCHANGE)))
    @precondition(lambda self: self.entries())
    def rename(self, at: int, to: int, name: bytes, flags: int) -> None:
        entries = self.entries()
        try:
            self.volume.rename(*entries[at % len(entries)], self.some(to, directories=True).inode, name, flags)
        except OSError:
            return

    @rule(at=which, to=which, name=names)
    def link(self, at: int, to: int, name: bytes) -> None:
        node = self.some(at)
        if node.is_dir or not node.nlink:
            return
        try:
            self.volume.link(node.inode, self.some(to, directories=True).inode, name)
        except OSError:
            return
        self.volume.forget(node.inode, 1)

    # -- inodes --------------------------------------------------------------------------------
    @rule(at=which, offset=st.sampled_from((0, 5000, BLOCK + 1)), data=st.binary(min_size=1, max_size=3))
    def write(self, at: int, offset: int, data: bytes) -> None:
        node = self.some(at)
        if node.is_file:
            try:
                self.volume.write(node.inode, offset, data)
            except OSError:
                return

    @rule(at=which, mode=st.sampled_from((0o700, 0o755)))
    def chmod(self, at: int, mode: int) -> None:
        try:
            self.volume.setattr(self.some(at).inode, AttributeChanges(mode=mode))
        except OSError:
            return

    @rule(at=which)
    def close_file(self, at: int) -> None:
        """The kernel forgets an inode: it is freed if it has no name."""
        self.forget(self.some(at).inode)

    # -- snapshots -----------------------------------------------------------------------------
    def free_name(self) -> str:
        self.serial += 1
        return f"x{self.serial}"

    @rule(tag=tags, automatic=st.booleans())
    def take_snapshot(self, tag: str, automatic: bool) -> None:
        try:
            self.volume.take_snapshot(tag, kind="automatic" if automatic else "user")
        except (FileExistsError, OSError):
            return

    def snapshots(self) -> list[str]:
        return [info.name for info in self.volume.snapshots()]

    @rule(at=which)
    @precondition(lambda self: self.snapshots())
    def drop_snapshot(self, at: int) -> None:
        found = self.snapshots()
        self.volume.drop_snapshot(found[at % len(found)])

    @rule(at=which, is_safe=st.booleans())
    @precondition(lambda self: self.snapshots())
    def restore(self, at: int, is_safe: bool) -> None:
        """Restore, undo or redo, which are one thing to a volume; usually after a safety snapshot."""
        if is_safe:
            self.volume.take_snapshot(self.free_name(), kind="safety")
        found = self.snapshots()  # the safety snapshot may have taken the room of an automatic one
        self.volume.restore_snapshot(found[at % len(found)])

    @rule(at=which, path=st.sampled_from((b"a", b"b", b"a/a")))
    @precondition(lambda self: self.snapshots())
    def restore_path(self, at: int, path: bytes) -> None:
        found = self.snapshots()
        try:
            self.volume.restore_snapshot(found[at % len(found)], [path])
        except OSError:
            return

    @rule(at=which, replace=st.booleans(), meanwhile=st.booleans())
    @precondition(lambda self: self.snapshots())
    def import_tree(self, at: int, replace: bool, meanwhile: bool) -> None:
        """Import what another volume has, as `vfsd import` does: in steps, while programs go on."""
        found = self.snapshots()
        archive = DictTree()
        with self.volume.tree(found[at % len(found)]) as tree:
            for entry in tree.walk():
                archive.by_path[entry.path] = entry
                if entry.is_file:
                    archive.content[entry.path] = b"".join(filled(tree.chunks(entry.path)))
        stage = self.volume.new_stage()
        try:
            stage.fill(archive, self.volume.reserve_inodes(len(archive.by_path)))
        except OSError:
            stage.give_back()
            return
        self.volume.take_snapshot(self.free_name(), kind="safety")
        with stage.tree() as tree, self.volume.tree():
            preparation = self.volume.preparation(tree, replace=replace)
            try:
                for _ in preparation.steps():
                    if meanwhile and self.entries():
                        meanwhile = False
                        self.remove(at, is_held=False)
                if preparation.is_valid:
                    self.volume.import_prepared(preparation)
                    return
            except OSError:
                pass
            for _ in preparation.discard():
                pass
        stage.give_back()

    # -- views and epochs ------------------------------------------------------------------------
    @rule(at=st.one_of(st.none(), which))
    def open_view(self, at: int | None) -> None:
        found = self.snapshots()
        if len(self.views) >= 2:
            return
        manager = self.volume.tree(None if at is None or not found else found[at % len(found)])
        tree = manager.__enter__()
        self.views.append((manager, tree, list(tree.walk())))

    @rule(at=which)
    @precondition(lambda self: self.views)
    def close_view(self, at: int) -> None:
        manager, tree, entries = self.views.pop(at % len(self.views))
        assert list(tree.walk()) == entries
        manager.__exit__(None, None, None)

    @rule()
    def mark(self) -> None:
        self.volume.mark()

    # -- images --------------------------------------------------------------------------------
    @rule(goes_on=st.booleans())
    def image(self, goes_on: bool) -> None:
        """Compare the volume with the replay of its image; `goes_on`: with that, as after an upgrade."""
        again = replayed(image_of(self.volume))
        again.check_invariants()
        assert_same_volume(self.volume, again)
        ours, theirs = (dict(self.every(volume)) for volume in (self.volume, again))
        assert ours == theirs
        if goes_on and not self.views:
            # A kernel still has what is open.
            again._state.lookups.update(self.volume.lookup_counts())
            again._state.ledger.set_limit(self.max_memory)
            again._state.clock = self.clock
            self.volume = again

    def every(self, volume: MemoryVolume) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return the facts of all inodes, also of those that are open and have no name."""
        for number, node in volume._state.inodes.items():
            yield number, facts(node) | {"atime_ns": node.atime_ns}

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "volume"):
            self.volume.check_invariants()


TestImageModel = ImageMachine.TestCase
TestImageModel.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
TestImageModel.pytestmark = [pytest.mark.timeout(3600)]
