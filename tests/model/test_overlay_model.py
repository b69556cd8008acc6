"""An overlay over a random directory behaves as a memory volume that was filled with it; below nothing changes.

The steps, the model and what is compared are the memory volume's (`test_memory_model`).  But the model knows all of
what is below from the beginning, and the volume nothing: it looks when a step asks it to.
"""

from __future__ import annotations

import copy
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import changes
from protocol.volume import ROOT_INODE
from tests.model.plain import Node, Plain, groups, page_up
from tests.model.test_memory_model import BLOCK, MemoryMachine, Walked, assert_shows, scopes
from tests.support.lower_layers import Layer, make, opened

# path, what it is: a size, None for a directory, text for a symlink, bytes for a hard link to another path
SPECS: tuple[tuple[tuple[bytes, Any], ...], ...] = (
    (),
    ((b"a", None), (b"a/a", 5_000), (b"a/b", 3), (b"b", None), (b"b/b", None), (b"b/b/c", BLOCK + 10), (b"c", "../b")),
    ((b"a", None), (b"a/a", 2 * BLOCK + 4097), (b"a/b", b"a/a"), (b"b", b"a/a"), (b"c", None), (b"c/a", None)),
    ((b"a", -(2 * BLOCK + 9000)), (b"b", None), (b"b/a", b"a"), (b"c", None), (b"c/a", -8192), (b"c/b", 0)),
)


class Met(Node):
    """A node whose number only the volume knows; its versions in snapshots share what was found out."""

    machine: OverlayMachine
    cell: list[int]

    @property  # type: ignore[override]
    def number(self) -> int:
        if not self.__dict__.get("cell"):
            return 0
        if not self.cell[0]:
            self.cell[0] = self.machine.find_out(self)
        return self.cell[0]

    @number.setter
    def number(self, value: int) -> None:
        if "cell" not in self.__dict__:
            self.cell = [0]
        self.cell[0] = value

    @property
    def is_met(self) -> bool:
        return bool(self.cell[0])

    def renumber(self, number: int) -> None:
        self.cell = [number]  # its other versions keep theirs


def fill(root: Path, spec: tuple[tuple[bytes, Any], ...]) -> None:
    for number, (name, what) in enumerate(spec, 1):
        path = os.fsencode(root) + b"/" + name
        if what is None:
            os.mkdir(path, 0o750)
        elif isinstance(what, str):
            os.symlink(what, path)
        elif isinstance(what, bytes):
            os.link(os.fsencode(root) + b"/" + what, path)
        else:
            with open(path, "wb") as file:
                if what < 0:  # sparse: a hole first
                    file.truncate(-what)
                    file.seek(-what // 2 // 4096 * 4096)
                    file.write(bytes([number]) * 4096)
                else:
                    file.write(bytes([number]) * what)
            os.chmod(path, 0o640)
            os.setxattr(path, b"user.x", b"1")


def data_pages(path: bytes) -> frozenset[int]:
    pages: set[int] = set()
    with open(path, "rb") as file:
        at, end = 0, os.fstat(file.fileno()).st_size
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            after = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            pages.update(range(at // 4096, -(-after // 4096)))
            at = after
    return frozenset(pages)


def seen(root: bytes) -> list[tuple[object, ...]]:
    """All of what is below, as it can be seen from outside; directories' times of reading apart."""
    found = []
    for above, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = above + b"/" + name
            at = os.lstat(path)
            content = Path(os.fsdecode(path)).read_bytes() if stat.S_ISREG(at.st_mode) else b""
            found.append((path, at.st_ino, at.st_mode, at.st_nlink, at.st_mtime_ns, at.st_ctime_ns, content))
    return found


class OverlayMachine(MemoryMachine):
    @initialize(  # type: ignore[override]
        max_pages=st.none(), max_inodes=st.none(), furnished=st.just(False), spec=st.sampled_from(SPECS)
    )
    def begin(self, max_pages: None, max_inodes: None, furnished: bool, spec: tuple[tuple[bytes, Any], ...]) -> None:
        self.directory_below = Path(tempfile.mkdtemp(prefix="vfsd-model-"))
        fill(self.directory_below, spec)
        self.below = os.fsencode(self.directory_below)
        self.before = seen(self.below)
        self.now = 4 * 10**18  # later than every file below, so no file there changed after a snapshot
        self.views = []
        self.stamp = 0
        self.model = Plain(self.node(self.below, {}))
        self.model.root.number = ROOT_INODE
        self.base = copy.deepcopy(self.model.root)
        self.volume = self.overlay()
        self.tick()

    def overlay(self) -> OverlayVolume:
        return OverlayVolume(self.below, clock=lambda: self.now)

    def node(self, path: bytes, known: dict[int, Met]) -> Met:
        at = os.lstat(path)
        if at.st_ino in known:
            return known[at.st_ino]
        node = Met(0, at.st_mode, at.st_mtime_ns, at.st_ctime_ns, at.st_uid, at.st_gid)
        node.machine = self
        if node.is_dir:
            node.entries = {name: self.node(path + b"/" + name, known) for name in os.listdir(path)}
        elif node.is_file:
            node.data = Path(os.fsdecode(path)).read_bytes()
            node.written = data_pages(path)
            node.xattrs = {b"user.x": b"1"}
        else:
            node.target = os.readlink(path)
        known[at.st_ino] = node
        return node

    def find_out(self, node: Met) -> int:
        """The number that the volume gives a node, by a path at which it is."""
        for root in (self.model.root, *self.model.snapshots.values(), self.base):
            paths = next((p for each, p in groups(root).items() if getattr(each, "cell", None) is node.cell), None)
            if paths is None:
                continue
            if root is self.model.root:
                return self.locate(self.volume, paths[0])
            name = next((name for name, each in self.model.snapshots.items() if each is root), None)
            with self.volume.tree(name) if name is not None else self.volume.base_tree() as tree:
                return tree.entry(paths[0]).inode
        for _, tree, root in self.views:
            for each, paths in groups(root).items():
                if getattr(each, "cell", None) is node.cell:
                    return tree.entry(paths[0]).inode
        raise AssertionError("a node that is nowhere")

    def teardown(self) -> None:
        try:
            if hasattr(self, "volume"):
                self.everything_is_the_models()
                with self.volume.base_tree() as tree:
                    assert_shows(tree, self.base)
            super().teardown()
            if hasattr(self, "volume"):
                assert seen(self.below) == self.before, "something changed below"
        finally:
            if hasattr(self, "directory_below"):
                shutil.rmtree(self.directory_below)

    # -- what the memory volume's machine does another way -----------------------------------------
    def remove(self, at: int, name: bytes, directory: bool) -> None:
        self.meet(self.directory(at).entries.get(name))
        super().remove(at, name, directory)

    def meet(self, node: Node | None) -> None:
        """A name that goes away cannot be asked for any more."""
        if node is not None:
            assert node.number

    @rule(tag=st.sampled_from(("s1", "s2", "s3")))
    def take_snapshot(self, tag: str) -> None:
        if tag in self.model.snapshots:
            with pytest.raises(FileExistsError):
                self.volume.take_snapshot(tag)
            return
        self.volume.take_snapshot(tag)
        self.model.snapshots[tag] = copy.deepcopy(self.model.root)

    # -- what only an overlay can do -----------------------------------------------------------------
    @rule()
    def discard(self) -> None:
        kernel = self.kernel()
        coherence = self.volume.discard()
        self.become(self.base)
        self.check_kernel(kernel, coherence)
        self.tick()

    @rule(paths=scopes)
    def discard_paths(self, paths: list[bytes]) -> None:
        self.put_back(lambda: self.volume.discard(paths), self.base, paths)

    @rule(contents=st.booleans())
    def diff_with_below(self, contents: bool) -> None:
        with self.volume.base_tree() as old, self.volume.tree() as new:
            short = list(changes(old, new, contents=contents))
            assert short == list(changes(old, Walked(new), contents=contents))

    # -- after every step ----------------------------------------------------------------------------
    @invariant()
    def live_state_is_the_models(self) -> None:
        """Of what was met; the rest is compared at the end, or when a step looks at it."""
        for node in self.model.every():
            if not isinstance(node, Met) or node.is_met:
                self.compare(node)

    def everything_is_the_models(self) -> None:
        for node in self.model.every():
            self.compare(node)

    def compare(self, node: Node) -> None:
        inode = self.volume.getattr(node.number)
        assert (inode.mode, inode.uid, inode.gid, inode.rdev) == (node.mode, node.uid, node.gid, node.rdev)
        assert (inode.mtime_ns, inode.ctime_ns) == (node.mtime, node.ctime), (node, self.now)
        assert self.volume.lookup_counts().get(node.number, 0) == self.model.lookups.get(node.number, 0) + (
            node.number == ROOT_INODE
        )
        assert inode.nlink == self.model.nlink(node)
        assert {name: self.volume.getxattr(node.number, name) for name in inode.xattrs or ()} == node.xattrs
        if node.is_dir:
            listed = {entry.name: entry.inode for entry in self.volume.readdir(node.number, 2)}
            assert listed.keys() == node.entries.keys()
            for name, child in node.entries.items():
                assert not child.number or listed[name] == child.number
        elif node.is_file:
            assert inode.size == len(node.data)
            assert self.volume.read(node.number, 0, inode.size + 1) == node.data
            seen = {page for page in node.written if page < page_up(inode.size)}
            assert self.written(node.number, inode.size) == seen
            assert bool(inode.blocks) == bool(node.pages)
        elif node.target:
            assert self.volume.readlink(node.number) == node.target


class LayerMachine(OverlayMachine):
    """The same over an archive or a stored snapshot, which know no holes.  An archive does not know ctimes either."""

    layer: Layer

    def overlay(self) -> OverlayVolume:
        place = self.directory_below.with_name(self.directory_below.name + ".zip")
        make(self.layer, self.directory_below, place)
        self.place = place
        return OverlayVolume(opened(self.layer, place, cache_bytes=1 << 20), clock=lambda: self.now)

    def node(self, path: bytes, known: dict[int, Met]) -> Met:
        node = super().node(path, known)
        if self.layer == "archive":
            node.ctime = node.mtime
        node.written = frozenset(range(page_up(len(node.data)))) if node.is_file else node.written
        return node

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "volume"):
                self.volume.lower.close()
                shutil.rmtree(self.place) if self.place.is_dir() else self.place.unlink()


class ArchiveMachine(LayerMachine):
    layer = "archive"


class SnapshotMachine(LayerMachine):
    layer = "snapshot"


TestOverArchive = ArchiveMachine.TestCase
TestOverArchive.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)
TestOverArchive.pytestmark = [pytest.mark.timeout(3600)]
TestOverSnapshot = SnapshotMachine.TestCase
TestOverSnapshot.settings = settings(max_examples=settings().max_examples, stateful_step_count=40)
TestOverSnapshot.pytestmark = [pytest.mark.timeout(3600)]
TestOverlayModel = OverlayMachine.TestCase
TestOverlayModel.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=40)
TestOverlayModel.pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(3600)]
