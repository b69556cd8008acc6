"""Random imports and large writes whose content is recorded ahead: the journal always leads to the live state.

Programs change files meanwhile, and imports are given up, replace files, and follow each other.  There is no model of
the state: the live volume is compared with what its journal is replayed to.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.backends.memory import MemoryVolume
from protocol.backends.memory.journaling import changes
from protocol.volume import ROOT_INODE, SUPERUSER
from tests.support.journals import JournalInMemory, assert_same_volume, replayed

FILE = stat.S_IFREG | 0o644
BLOCK = 131072

Place = tuple[bytes, bytes]
Tree = dict[Place, bytes | Place]

names = st.sampled_from((b"a", b"b", b"c"))
contents = st.builds(
    lambda byte, size: bytes([byte]) * size, st.integers(1, 3), st.sampled_from((1, 5_000, BLOCK + 5, 2 * BLOCK))
)
places = st.tuples(names, names)
trees = st.dictionaries(places, contents | places, max_size=5)  # a place: another name of that file
steps = st.one_of(
    st.tuples(st.just("import"), trees, st.booleans(), st.sampled_from(("put", "put", "discard"))),
    st.tuples(st.just("write ahead"), names, contents, st.booleans()),
    st.tuples(st.just("write"), names, contents),
    st.tuples(st.just("remove"), names),
    st.tuples(st.just("snapshot"), names),
)


@pytest.fixture(autouse=True, scope="module")
def every_block_is_stored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "SMALLEST_BYTES", 1)
        patch.setattr(changes, "_STEP_PIECES", 2)
        yield


def imported(tree: Tree) -> MemoryVolume:
    """Return a volume with the files of `tree`; names of files that it lacks are left out."""
    volume = MemoryVolume(uid=1, gid=2)
    for (above, name), what in sorted(tree.items(), key=lambda item: isinstance(item[1], tuple)):
        found = volume.find(ROOT_INODE, above) or volume.mkdir(ROOT_INODE, above, 0o755, SUPERUSER)
        if isinstance(what, bytes):
            volume.write(volume.mknod(found.inode, name, FILE, 0, SUPERUSER).inode, 0, what)
            continue
        directory = volume.find(ROOT_INODE, what[0])
        file = None if directory is None else volume.find(directory.inode, what[1])
        if file is not None:
            volume.link(file.inode, found.inode, name)
    return volume


class History:
    def __init__(self) -> None:
        self.volume = MemoryVolume(uid=1, gid=2)
        self.journal = JournalInMemory()
        self.journal.keep(self.volume)
        self.serial = 0

    def write(self, name: bytes, data: bytes) -> None:
        found = self.volume.find(ROOT_INODE, name)
        if found is None:
            found = self.volume.mknod(ROOT_INODE, name, FILE, 0, SUPERUSER)
        if not found.is_dir:
            self.volume.write(found.inode, 0, data)

    def remove(self, name: bytes) -> None:
        found = self.volume.find(ROOT_INODE, name)
        if found is not None and not found.is_dir:
            self.volume.unlink(ROOT_INODE, name)

    def snapshot(self, name: bytes) -> None:
        self.serial += 1
        self.volume.take_snapshot(f"{name.decode()}{self.serial}")

    def write_ahead(self, name: bytes, data: bytes, is_other: bool) -> None:
        """As `vfsd fs write`; `is_other`: what is written is not what was announced."""
        for _ in self.volume.store_content(data):
            self.write(b"meanwhile", data[:10])
        with self.volume.changes():
            self.write(name, data[::-1] + b"!" if is_other else data)
        self.volume.drop_stored()

    def import_tree(self, tree: Tree, replace: bool, end: str) -> None:
        other = imported(tree)
        stage = self.volume.new_stage()
        with other.tree() as source:
            stage.fill(source, self.volume.reserve_inodes(20))
        with stage.tree() as source, self.volume.tree():
            preparation = self.volume.preparation(source, replace=replace)
            for count, _ in enumerate(preparation.steps()):
                self.write(b"meanwhile", b"%d" % count)
            if end == "put" and preparation.is_valid:
                self.volume.import_prepared(preparation)
                return
            for _ in preparation.discard():
                pass
        stage.give_back()

    def step(self, kind: str, *arguments: Any) -> None:
        getattr(self, {"import": "import_tree", "write ahead": "write_ahead"}.get(kind, kind))(*arguments)


@given(some=st.lists(steps, min_size=1, max_size=6))
@settings(max_examples=3 * settings().max_examples)
def test_the_journal_leads_to_the_state_after_each_step_and_is_whole_at_each_record(some: list[Any]) -> None:
    history = History()
    for each in some:
        before = len(history.journal.batches())
        history.step(*each)
        history.volume.check_invariants()
        history.volume.flush_journal()
        batches = history.journal.batches()
        again = replayed(batches)
        again.check_invariants()
        assert_same_volume(history.volume, again)
        for end in range(before, len(batches), 1 + (len(batches) - before) // 3):  # where a daemon may have died
            replayed(batches[:end]).check_invariants()
