"""Random operations on a memory volume, with snapshots and all that goes with them, against the plain model.

After every step: the invariants hold, the whole tree is the model's, what is open and unlinked reads as in the
model, and a view that is open shows its own moment.  After every change beside the mount a simulated kernel
that had cached everything must have been told what is no longer true.
"""

from __future__ import annotations

import copy
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.backends.memory import MemoryVolume
from protocol.diff.tree_diff import changes, is_below
from protocol.tree import CHUNK_BYTES, Tree, TreeEntry, filled
from protocol.volume import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE, AttributeChanges, Caller
from tests.model.kernel import KernelCache
from tests.model.plain import Node, Plain, find, groups, page_up, walk
from tests.support.trees import DictTree

KEEP_SIZE, PUNCH_HOLE = 1, 2  # linux/falloc.h
BLOCK = 131072
CALLER = Caller(7, 8)
NAMES = (b"a", b"b", b"c")
SNAPSHOTS = ("s1", "s2", "s3")
PATHS = (b"", b"a", b"b", b"c", b"a/a", b"a/b", b"b/a", b"b/b/c", b"c/a/b")

names = st.sampled_from(NAMES)
which = st.integers(0, 11)
tags = st.sampled_from(SNAPSHOTS)
offsets = st.sampled_from((0, 1, 4095, 4096, 4097, 10_000, BLOCK - 4096, BLOCK - 1, BLOCK, BLOCK + 4096))
lengths = st.sampled_from((1, 100, 4095, 4096, 4097, 9_000, BLOCK, BLOCK + 1))
scopes = st.lists(st.sampled_from(PATHS[1:]), min_size=1, max_size=2, unique=True)


class Walked:
    """A tree that hides what it knows about another, so that a diff has to walk and read both."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def entry(self, path: bytes) -> TreeEntry:
        return self._tree.entry(path)

    def entries(self, path: bytes) -> Iterable[TreeEntry]:
        return self._tree.entries(path)

    def walk(self, path: bytes = b"") -> Iterator[TreeEntry]:
        return self._tree.walk(path)

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        return self._tree.read(path, offset, size)

    def chunks(self, path: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        return self._tree.chunks(path, size)

    def touched(self, other: Tree) -> Collection[bytes] | None:
        return None


def tree_entries(root: Node) -> Iterator[tuple[TreeEntry, bytes]]:
    links = groups(root)
    for path, node in walk(root):
        nlink = 2 + sum(child.is_dir for child in node.entries.values()) if node.is_dir else len(links[node])
        yield (
            TreeEntry(
                path,
                node.mode,
                node.size,
                node.mtime,
                node.uid,
                node.gid,
                nlink,
                node.number,
                node.rdev,
                node.target,
                node.xattrs,
                node.ctime,
            ),
            node.data,
        )


def _equals(node: Node, other: Node) -> bool:
    """Whether two nodes are equal in content and metadata."""
    names = ("mode", "uid", "gid", "rdev", "mtime", "target", "data", "pages", "xattrs")
    return all(getattr(node, name) == getattr(other, name) for name in names)


def ancestors(path: bytes) -> list[bytes]:
    parts = path.split(b"/")
    return [b"/".join(parts[:end]) for end in range(len(parts))]


def as_tree(root: Node) -> DictTree:
    tree = DictTree()
    for entry, data in tree_entries(root):
        tree.by_path[entry.path] = entry
        if entry.is_file:
            tree.content[entry.path] = data
    return tree


def assert_shows(tree: Tree, root: Node) -> None:
    expected = list(tree_entries(root))
    assert list(tree.walk()) == [entry for entry, _ in expected]
    for entry, data in expected:
        if entry.is_file:
            assert b"".join(filled(tree.chunks(entry.path, 50_000))) == data


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        max_pages=st.sampled_from((None, None, 40, 100)),
        max_inodes=st.sampled_from((None, None, 9)),
        furnished=st.sampled_from((True, True, True, False)),
    )
    def begin(self, max_pages: int | None, max_inodes: int | None, furnished: bool) -> None:
        self.now = 1_000
        max_bytes = None if max_pages is None else max_pages * 4096 + 17
        self.volume = MemoryVolume(max_bytes, max_inodes, clock=lambda: self.now, uid=1, gid=2)
        root = Node(ROOT_INODE, stat.S_IFDIR | 0o755, 1_000, 1_000, 1, 2)
        self.model = Plain(root, max_pages, max_inodes)
        self.views: list[tuple[AbstractContextManager[Tree], Tree, Node]] = []
        self.stamp = 0
        self.tick()
        if furnished:
            self.furnish()

    def furnish(self) -> None:
        """Something to begin with, so that no steps are spent on getting there."""
        self.mkdir(0, b"a")
        self.mkdir(0, b"b")
        self.mknod(0, b"c", stat.S_IFREG)
        self.mknod(1, b"a", stat.S_IFREG)
        self.mkdir(2, b"b")
        for at in (0, 1):
            self.write(at, 0, 5_000)
        self.take_snapshot("s1")

    def teardown(self) -> None:
        for manager, tree, root in getattr(self, "views", []):
            assert_shows(tree, root)
            manager.__exit__(None, None, None)
        if hasattr(self, "volume"):
            self.volume.check_invariants()

    # -- picking -------------------------------------------------------------------------------
    def tick(self) -> None:
        self.now += 1_000
        self.model.now = self.now

    def directory(self, at: int) -> Node:
        found = [node for node in self.model.nodes() if node.is_dir]
        return found[at % len(found)]

    def some(self, at: int) -> Node:
        found = self.model.every()
        return found[at % len(found)]

    def file(self, at: int) -> Node | None:
        found = [node for node in self.model.every() if node.is_file]
        return found[at % len(found)] if found else None

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> object:
        """Run both; they give the same, or fail with the same errno."""
        outcomes: list[object] = []
        for run in (real, model):
            try:
                outcomes.append(("returned", run()))
            except OSError as error:
                outcomes.append(("failed", errno.errorcode[error.errno or 0]))
        first, second = outcomes
        if isinstance(first, tuple) and isinstance(second, tuple) and first[0] == second[0] == "returned":
            return first[1] if second[1] is None else self._equal(first[1], second[1])
        assert first == second
        return None

    def _equal(self, first: object, second: object) -> object:
        assert first == second
        return first

    # -- names ---------------------------------------------------------------------------------
    def enter(self, real: Callable[[], int], parent: Node, name: bytes, node: Node) -> None:
        number = self.agree(real, lambda: self.model.make(parent, name, node))
        if isinstance(number, int):
            node.number = number
            self.model.hold(node)
        self.tick()

    def new(self, mode: int) -> Node:
        return Node(0, mode, self.now, self.now, CALLER.uid, CALLER.gid)

    @rule(at=which, name=names, kind=st.sampled_from((stat.S_IFREG, stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR)))
    def mknod(self, at: int, name: bytes, kind: int) -> None:
        parent, node = self.directory(at), self.new(kind | 0o640)
        node.rdev = 0x105 if kind == stat.S_IFCHR else 0
        self.enter(
            lambda: self.volume.mknod(parent.number, name, kind | 0o640, 0x105, CALLER).inode, parent, name, node
        )

    @rule(at=which, name=names)
    def mkdir(self, at: int, name: bytes) -> None:
        parent, node = self.directory(at), self.new(stat.S_IFDIR | 0o750)
        self.enter(lambda: self.volume.mkdir(parent.number, name, 0o750, CALLER).inode, parent, name, node)

    @rule(at=which, name=names, to=st.sampled_from((b"a", b"../b", b"x" * 200)))
    def symlink(self, at: int, name: bytes, to: bytes) -> None:
        parent, node = self.directory(at), self.new(stat.S_IFLNK | 0o777)
        node.target = to
        self.enter(lambda: self.volume.symlink(parent.number, name, to, CALLER).inode, parent, name, node)

    @rule(at=which)
    def tmpfile(self, at: int) -> None:
        parent, node = self.directory(at), self.new(stat.S_IFREG | 0o600)
        if parent.mode & stat.S_ISGID:
            node.gid = parent.gid
        number = self.agree(
            lambda: self.volume.tmpfile(parent.number, 0o600, CALLER).inode, lambda: self.model.check_room(0, 1)
        )
        if isinstance(number, int):
            node.number = number
            self.model.hold(node)
            self.model.orphans[number] = node
        self.tick()

    @rule(at=which, to=which, name=names)
    def link(self, at: int, to: int, name: bytes) -> None:
        node, parent = self.some(at), self.directory(to)
        done = self.agree(
            lambda: self.volume.link(node.number, parent.number, name).inode,
            lambda: self.model.link(node, parent, name),
        )
        if done is not None:
            self.model.hold(node)
        self.tick()

    @rule(at=which, name=names, directory=st.booleans())
    def remove(self, at: int, name: bytes, directory: bool) -> None:
        parent = self.directory(at)
        remove = self.volume.rmdir if directory else self.volume.unlink
        self.agree(lambda: remove(parent.number, name), lambda: self.model.remove(parent, name, directory=directory))
        self.tick()

    @rule(
        at=which,
        name=names,
        to=which,
        new_name=names,
        flags=st.sampled_from((0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE)),
    )
    def rename(self, at: int, name: bytes, to: int, new_name: bytes, flags: int) -> None:
        source, target = self.directory(at), self.directory(to)
        self.agree(
            lambda: self.volume.rename(source.number, name, target.number, new_name, flags),
            lambda: self.model.rename(source, name, target, new_name, flags),
        )
        self.tick()

    @rule(at=which, name=names)
    def lookup(self, at: int, name: bytes) -> None:
        parent = self.directory(at)
        node = parent.entries.get(name)
        if node is None:
            with pytest.raises(FileNotFoundError):
                self.volume.lookup(parent.number, name)
        else:
            assert self.volume.lookup(parent.number, name).inode == node.number
            self.model.hold(node)

    @rule(at=which, everything=st.booleans())
    @precondition(lambda self: self.model.lookups)
    def forget(self, at: int, everything: bool) -> None:
        numbers = sorted(self.model.lookups)
        number = numbers[at % len(numbers)]
        count = self.model.lookups[number] if everything else 1
        self.volume.forget(number, count)
        self.model.forget(number, count)
        if number not in {node.number for node in self.model.every()}:
            with pytest.raises(FileNotFoundError):
                self.volume.getattr(number)

    # -- content -------------------------------------------------------------------------------
    @rule(at=which, offset=offsets, length=lengths)
    def write(self, at: int, offset: int, length: int) -> None:
        node = self.file(at)
        if node is None:
            return
        self.stamp = self.stamp % 255 + 1
        data = bytes([self.stamp]) * length
        self.agree(lambda: self.volume.write(node.number, offset, data), lambda: self.model.write(node, offset, data))
        self.tick()

    @rule(at=which, size=offsets)
    def truncate(self, at: int, size: int) -> None:
        node = self.file(at)
        if node is None:
            return
        self.volume.setattr(node.number, AttributeChanges(size=size))
        self.model.truncate(node, size)
        self.tick()

    @rule(at=which, offset=offsets, length=lengths)
    def punch(self, at: int, offset: int, length: int) -> None:
        node = self.file(at)
        if node is None:
            return
        self.volume.fallocate(node.number, PUNCH_HOLE | KEEP_SIZE, offset, length)
        self.model.punch(node, offset, length)
        self.tick()

    @rule(at=which, offset=offsets, length=lengths, keep_size=st.booleans())
    def allocate(self, at: int, offset: int, length: int, keep_size: bool) -> None:
        node = self.file(at)
        if node is None:
            return
        self.agree(
            lambda: self.volume.fallocate(node.number, KEEP_SIZE if keep_size else 0, offset, length),
            lambda: self.model.allocate(node, offset, length, keep_size=keep_size),
        )
        self.tick()

    # -- attributes ----------------------------------------------------------------------------
    @rule(at=which, mode=st.sampled_from((0o644, 0o2755, 0o700)), uid=st.sampled_from((None, 0, 5)))
    def setattr(self, at: int, mode: int, uid: int | None) -> None:
        node = self.some(at)
        self.volume.setattr(node.number, AttributeChanges(mode=mode, uid=uid, gid=uid, mtime_ns=55))
        node.mode = stat.S_IFMT(node.mode) | mode
        node.uid, node.gid = (node.uid, node.gid) if uid is None else (uid, uid)
        node.mtime, node.ctime = 55, self.now
        self.tick()

    @rule(at=which, value=st.sampled_from((b"", b"1", b"2" * 100)))
    def setxattr(self, at: int, value: bytes) -> None:
        node = self.some(at)
        self.volume.setxattr(node.number, b"user.x", value, 0)
        node.xattrs = {**node.xattrs, b"user.x": value}
        node.ctime = self.now
        self.tick()

    @rule(at=which)
    def removexattr(self, at: int) -> None:
        node = self.some(at)
        if b"user.x" not in node.xattrs:
            with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
                self.volume.removexattr(node.number, b"user.x")
            return
        self.volume.removexattr(node.number, b"user.x")
        node.xattrs = {}
        node.ctime = self.now
        self.tick()

    # -- snapshots -----------------------------------------------------------------------------
    @rule(tag=tags)
    def take_snapshot(self, tag: str) -> None:
        if tag in self.model.snapshots:
            with pytest.raises(FileExistsError):
                self.volume.take_snapshot(tag)
            return
        info = self.volume.take_snapshot(tag)
        self.model.snapshots[tag] = copy.deepcopy(self.model.root)
        nodes = self.model.nodes()
        assert info.directories == sum(node.is_dir for node in nodes)
        assert info.files == len(nodes) - info.directories
        assert info.size_bytes == sum(len(node.data) for node in nodes)

    @rule(tag=tags)
    @precondition(lambda self: self.model.snapshots)
    def drop_snapshot(self, tag: str) -> None:
        if tag not in self.model.snapshots:
            with pytest.raises(FileNotFoundError):
                self.volume.drop_snapshot(tag)
            return
        self.volume.drop_snapshot(tag)
        del self.model.snapshots[tag]

    def kernel(self) -> KernelCache:
        return KernelCache(self.volume, (node.number for node in self.model.every()), NAMES)

    def check_kernel(self, kernel: KernelCache, coherence: object) -> None:
        numbers = [node.number for node in self.model.every()]
        kernel.check(self.volume, coherence, numbers)  # type: ignore[arg-type]

    @rule(tag=tags)
    @precondition(lambda self: self.model.snapshots)
    def restore(self, tag: str) -> None:
        if tag not in self.model.snapshots:
            return
        kernel = self.kernel()
        coherence = self.volume.restore_snapshot(tag)
        self.become(self.model.snapshots[tag])
        self.check_kernel(kernel, coherence)
        self.tick()

    def become(self, source: Node) -> None:
        """Put a copy of a former state in place, with the numbers that its directories have got.

        A number that the kernel holds as that of a removed directory is not used again; a copy that an earlier restore
        made in the same place keeps its number.
        """
        root = copy.deepcopy(source)
        taken = {node.number for node in self.model.every() if node.is_met}
        live = {path: node for path, node in walk(self.model.root) if node.is_dir and node.is_met}
        linked = {node.number for node in live.values()}
        for path, node in walk(root):
            if node.is_dir and node.is_met and node.number not in linked:
                number = self.locate(self.volume, path)
                assert number not in self.model.orphans
                copied = path in live and live[path].number == number
                anew = node.number in self.model.orphans and number not in taken
                assert copied or anew or number == node.number
                node.renumber(number)
        self.model.become(root)

    @rule(tag=tags, paths=scopes)
    @precondition(lambda self: self.model.snapshots)
    def restore_paths(self, tag: str, paths: list[bytes]) -> None:
        if tag not in self.model.snapshots:
            return
        self.put_back(lambda: self.volume.restore_snapshot(tag, paths), self.model.snapshots[tag], paths)

    def put_back(self, real: Callable[[], object], source: Node, paths: list[bytes]) -> None:
        """Run `real`, which makes `paths` equal to `source`, a former state.  No other path changes."""
        then = groups(source)
        trial = self.trial()
        live = {node.number: node for node in trial.nodes()}

        def same(like: Node) -> Node | None:
            node = live.get(like.number)
            now = set(groups(trial.root).get(node, [])) if node is not None else set()
            outside = {path for path in now if not any(is_below(path, scope) for scope in paths)}
            if node is None or now.isdisjoint(then[like]):
                return None
            return node if not outside or (outside <= set(then[like]) and _equals(node, like)) else None

        self.put(trial, real, source, paths, True, same, own=True)

    @rule(tag=tags, replace=st.booleans(), paths=st.one_of(st.just([]), scopes), memory=st.booleans())
    @precondition(lambda self: self.model.snapshots)
    def import_tree(self, tag: str, replace: bool, paths: list[bytes], memory: bool) -> None:
        """The tree of a snapshot, but as a stranger's: its inode numbers mean nothing here."""
        if tag not in self.model.snapshots:
            return
        source = self.model.snapshots[tag]
        plain = as_tree(source)

        def put() -> object:
            if not memory:
                return self.volume.import_tree(plain, replace=replace, paths=paths)
            other = MemoryVolume()
            other.import_tree(plain, replace=True)
            for path, node in walk(source):  # so that blocks can be changed in place
                if len(node.data) > 1:
                    number = self.locate(other, path)
                    other.write(number, 0, node.data[:1])
                    other.setattr(number, AttributeChanges(mtime_ns=node.mtime))
            with other.tree() as tree:
                coherence = self.volume.import_tree(tree, replace=replace, paths=paths)
            for path, node in walk(source):  # the other goes its own way, and nothing of it is seen here
                if node.is_file:
                    other.write(self.locate(other, path), 0, b"other")
            return coherence

        self.put(self.trial(), put, source, paths, replace, lambda like: None)

    def locate(self, volume: MemoryVolume, path: bytes) -> int:
        number = ROOT_INODE
        for name in path.split(b"/") if path else ():
            number = volume.lookup(number, name).inode
            volume.forget(number, 1)
        return number

    def trial(self) -> Plain:
        trial = Plain(copy.deepcopy(self.model.root))
        trial.now = self.now
        return trial

    def put(
        self,
        trial: Plain,
        real: Callable[[], object],
        source: Node,
        paths: list[bytes],
        replace: bool,
        same: Callable[[Node], Node | None],
        *,
        own: bool = False,
    ) -> None:
        """Run `real`, which puts `source` in place, and let the model adopt what it does not foresee."""
        kernel = self.kernel()
        before = dict(walk(self.model.root))
        pages, inodes = self.model.pages(), len(self.model.every())
        try:
            trial.converge(source, paths, replace=replace, same=same)
            expected = None
        except OSError as error:
            expected = error.errno
        coherence, failed = self.attempt(real)
        if failed:
            limited = self.model.max_pages is not None or self.model.max_inodes is not None
            assert failed == expected or (failed == errno.ENOSPC and limited)
            self.tick()
            return
        assert expected is None
        self.adopt(trial, before, {above for path in paths for above in ancestors(path)}, source if own else None)
        self.model.become(trial.root)
        for node in self.model.orphans.values():  # removing them, and what was in them, is a change
            inode = self.volume.getattr(node.number)
            assert {inode.mtime_ns, inode.ctime_ns} <= {node.mtime, node.ctime, self.now}
            node.mtime, node.ctime = inode.mtime_ns, inode.ctime_ns
        if self.model.max_pages is not None:
            assert self.model.pages() <= max(pages, self.model.max_pages)
        if self.model.max_inodes is not None:
            assert len(self.model.every()) <= max(inodes, self.model.max_inodes)
        self.check_kernel(kernel, coherence)
        self.tick()

    def attempt(self, run: Callable[[], object]) -> tuple[object, int | None]:
        try:
            return run(), None
        except OSError as error:
            return None, error.errno

    def adopt(self, trial: Plain, before: dict[bytes, Node], parents: set[bytes], own: Node | None) -> None:
        """Take over inode numbers, ctimes and what was written; `parents` may have got a new mtime, or not.

        `own` is the root of a snapshot of this volume: it may give a file its old inode back, although an equal
        one was there.
        """
        numbers: dict[Node, int] = {}
        for path, node in walk(trial.root):
            inode = self.volume.getattr(self.locate(self.volume, path))
            assert numbers.setdefault(node, inode.inode) == inode.inode, "one file became two"
            old = before.get(path)
            if path in parents:
                assert inode.mtime_ns in (self.now, node.mtime, old.mtime if old is not None else 0)
                node.mtime = inode.mtime_ns
            if old is not None and (old.mode, old.data, old.target, old.xattrs, old.mtime, old.uid, old.rdev) == (
                node.mode,
                node.data,
                node.target,
                node.xattrs,
                node.mtime,
                node.uid,
                node.rdev,
            ):
                then = find(own, path) if own is not None else old
                alone = self.model.nlink(old) == 1 and trial.nlink(node) == 1
                alone = alone and then is not None and then.number == old.number
                assert not alone or old.number == inode.inode, "what is equal is not touched"
            node.number, node.ctime = inode.inode, inode.ctime_ns
            if node.is_file:
                kept = inode.content.reserved if inode.content is not None else ()
                pages = {each: frozenset(range(each.first, each.after)) for each in kept}
                node.reserved = frozenset().union(*(pages[each] for each in kept if not each.is_data))
                node.written = self.written(inode.inode, inode.size)
                node.written = node.written.union(*(pages[each] for each in kept if each.is_data))
        assert len(set(numbers.values())) == len(numbers), "two files became one"

    def written(self, number: int, size: int) -> frozenset[int]:
        pages: set[int] = set()
        offset = 0
        while offset < size:
            try:
                offset = self.volume.seek(number, offset, os.SEEK_DATA)
            except OSError:
                break
            end = self.volume.seek(number, offset, os.SEEK_HOLE)
            pages.update(range(offset // 4096, page_up(end)))
            offset = end
        return frozenset(pages)

    # -- views and diffs -------------------------------------------------------------------------
    @rule(tag=st.sampled_from((None, *SNAPSHOTS)))
    def open_view(self, tag: str | None) -> None:
        root = self.model.root if tag is None else self.model.snapshots.get(tag)
        if root is None or len(self.views) >= 3:
            return
        manager = self.volume.tree(tag)
        tree = manager.__enter__()
        self.views.append((manager, tree, copy.deepcopy(root)))

    @rule(at=which)
    @precondition(lambda self: self.views)
    def close_view(self, at: int) -> None:
        manager, tree, root = self.views.pop(at % len(self.views))
        assert_shows(tree, root)
        manager.__exit__(None, None, None)

    @rule(old=st.sampled_from((None, *SNAPSHOTS)), new=st.sampled_from((None, *SNAPSHOTS)), contents=st.booleans())
    @precondition(lambda self: self.model.snapshots)
    def diff(self, old: str | None, new: str | None, contents: bool) -> None:
        known = self.model.snapshots.keys() | {None}
        if old not in known or new not in known:
            return
        with self.volume.tree(old) as left, self.volume.tree(new) as right:
            short = list(changes(left, right, contents=contents))
            assert short == list(changes(left, Walked(right), contents=contents))
            for change in short:
                assert find(self.model.snapshots[old] if old else self.model.root, change.path) or not change.old

    # -- after every step --------------------------------------------------------------------------
    @invariant()
    def holds_together(self) -> None:
        self.volume.check_invariants()

    @invariant()
    def live_state_is_the_models(self) -> None:
        for node in self.model.every():
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
                assert listed == {name: child.number for name, child in node.entries.items()}
            elif node.is_file:
                assert inode.size == len(node.data)
                assert self.volume.read(node.number, 0, inode.size + 1) == node.data
                assert inode.blocks == 8 * node.pages
            elif node.target:
                assert self.volume.readlink(node.number) == node.target
        assert self.volume.usage().used_bytes == 4096 * self.model.pages()

    @invariant()
    def an_open_view_shows_its_moment(self) -> None:
        if self.views:
            _, tree, root = self.views[self.now // 1_000 % len(self.views)]
            assert_shows(tree, root)

    @invariant()
    def a_snapshot_is_what_it_was(self) -> None:
        # One of them at a step, and never the first thing that looks at it: a view opens an epoch.
        names = sorted(self.model.snapshots)
        if names and self.now // 1_000 % 5 == 0:
            name = names[self.now // 5_000 % len(names)]
            with self.volume.tree(name) as tree:
                assert_shows(tree, self.model.snapshots[name])


TestMemoryModel = MemoryMachine.TestCase
# Most steps are cheap.
TestMemoryModel.settings = settings(max_examples=4 * settings().max_examples, stateful_step_count=40)
TestMemoryModel.pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # what it finds takes long to shrink
