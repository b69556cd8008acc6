"""Undo and redo of the snapshots in a volume and of those in a store, against plain states; without a mount."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.diff.tree_diff import Change
from protocol.store import DirectorySource, DirectoryTarget, Store
from protocol.tree import Tree, names_in
from protocol.volume import ROOT_INODE, AttributeChanges, Caller
from protocol.volume_extensions import CacheInvalidation, SnapshotInfo
from vfsd.daemon.snapshots.base import UNOBSERVED, Outcome, SnapshotService
from vfsd.daemon.snapshots.history import STEPS_KEPT
from vfsd.daemon.snapshots.store_restore import Stored
from vfsd.daemon.snapshots.stored import StoreSnapshots
from vfsd.daemon.snapshots.volume import VolumeSnapshots

Content = dict[str, bytes]

NAMES = ("a", "b", "c")
TAGS = ("r1", "r2", "r3")
ME = Caller(os.geteuid(), os.getegid())


class Unmounted:
    """A `MountedVolume` without a mount: there are no kernel caches to invalidate."""

    mountpoint = "/"
    policy = None

    def __init__(self) -> None:
        self.change_lock = trio.Lock()
        self.meanwhile: list[Callable[[], None]] = []  # what programs do right after the next commit

    def shown(self, tree: Tree) -> Tree:
        return tree

    async def write_back(self) -> None:
        pass

    async def invalidate(self, invalidation: CacheInvalidation, changed: Sequence[bytes] | None = None) -> None:
        while self.meanwhile:
            self.meanwhile.pop()()

    async def snapshots_taken(self) -> None:
        pass

    def in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Leave out the garbage collection of a long history: it changes no state that has a name."""


class Unopened:
    """An `ExternallyChangedVolume` without open files."""

    def hold(self, paths: Iterable[bytes]) -> None:
        pass

    def invalidation_of(self, changes: Iterable[Change]) -> CacheInvalidation:
        return CacheInvalidation()

    def release(self) -> None:
        pass


class InVolume:
    """Files in the root of a volume."""

    def __init__(self, volume: MemoryVolume) -> None:
        self.volume = volume
        self.served = Unmounted()
        self.snapshots: SnapshotService = VolumeSnapshots(self.served, volume)  # type: ignore[arg-type]

    def write(self, name: str, content: bytes) -> None:
        volume, raw = self.volume, name.encode()
        if name in self.content():
            inode = volume.lookup(ROOT_INODE, raw).inode
            volume.setattr(inode, AttributeChanges(size=0))
        else:
            inode = volume.mknod(ROOT_INODE, raw, 0o100644, 0, ME).inode
        volume.write(inode, 0, content)
        volume.forget(inode, 1)

    def remove(self, name: str) -> None:
        self.volume.unlink(ROOT_INODE, name.encode())

    def content(self) -> Content:
        with self.volume.tree() as tree:
            return {name.decode(): tree.read(name, 0, 100) for name in names_in(tree, b"")}

    def prune(self, count: int) -> list[SnapshotInfo]:
        """What the volume does where memory is short: drop the oldest snapshots that no user named."""
        volume = self.volume
        pruned = [info for info in volume.snapshots() if info.kind != "user"][:count]
        for info in pruned:
            volume.drop_snapshot(info.name)
            assert volume.on_pruned is not None
            volume.on_pruned(info)
        return pruned

    def check(self) -> None:
        self.volume.check_invariants()

    def again(self) -> None:
        """A volume lives as long as its daemon."""


class InStore:
    """Files of a host directory."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "host"
        self.place.mkdir()
        self.store = Store(directory / "store")
        self.again()

    def again(self) -> None:
        """Another daemon serves the directory."""
        place = os.fspath(self.place)
        self.served = Unmounted()
        self.store.close()
        self.store = Store(self.store.directory)
        stored = Stored(self.store, f"host:{place}", DirectorySource(place), DirectoryTarget(place))
        self.snapshots: SnapshotService = StoreSnapshots(self.served, Unopened(), stored)  # type: ignore[arg-type]

    def write(self, name: str, content: bytes) -> None:
        (self.place / name).write_bytes(content)

    def remove(self, name: str) -> None:
        (self.place / name).unlink()

    def content(self) -> Content:
        return {path.name: path.read_bytes() for path in self.place.iterdir()}

    def prune(self, count: int) -> list[SnapshotInfo]:
        """A store is on disk."""
        return []

    def check(self) -> None:
        pass


@dataclass
class Model:
    """A row of states and a position; `states[position]` is filled in when it is left."""

    live: Content = field(default_factory=dict)
    states: list[Content | None] = field(default_factory=lambda: [None])
    position: int = 0
    lost: list[Content] = field(default_factory=list)  # what a new step cut off, or another state took the place of

    def step(self, target: Content) -> bool:
        if target == self.live:
            return False
        self.lost += [state for state in self.states[self.position :] if state is not None]
        self.states = [*self.states[: self.position], dict(self.live), None][-(STEPS_KEPT + 1) :]
        self.position = len(self.states) - 1
        self.live = dict(target)
        return True

    def cut(self, lost: Collection[int]) -> None:
        """Without the states at these positions and those beyond them; the live state stays."""
        first = max((at + 1 for at in lost if at < self.position), default=0)
        after = min((at for at in lost if at > self.position), default=len(self.states))
        if self.position in lost:
            self.states[self.position] = None
        self.states, self.position = self.states[first:after], self.position - first
        self.lost.clear()

    def move(self, by: int) -> bool:
        to = self.position + by
        if not 0 <= to < len(self.states):
            return False
        there = self.states[self.position]
        if there is not None and there != self.live:
            self.lost.append(there)
        self.states[self.position] = dict(self.live)
        target = self.states[to]
        assert target is not None
        self.position, self.live = to, dict(target)
        return True


class UndoMachine(RuleBasedStateMachine):
    def __init__(self, subject: InVolume | InStore) -> None:
        super().__init__()
        self.subject = subject
        self.model = Model()
        self.taken: dict[str, Content] = {}
        self.clock = 0
        self.written: Content = {}  # right after a commit, before its answer

    @rule(name=st.sampled_from(NAMES))
    def write(self, name: str) -> None:
        self.clock += 1
        content = b"%d" % self.clock
        self.subject.write(name, content)
        self.model.live[name] = content

    @rule(name=st.sampled_from(NAMES))
    def write_amid_the_next_step(self, name: str) -> None:
        self.clock += 1
        content = b"%d" % self.clock

        def write() -> None:
            self.subject.write(name, content)
            self.written[name] = content

        self.subject.served.meanwhile = [write]

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name in self.model.live:
            self.subject.remove(name)
            del self.model.live[name]

    @rule(name=st.sampled_from(TAGS))
    def snapshot(self, name: str) -> None:
        if name not in self.taken:
            trio.run(self.subject.snapshots.take, name, None, UNOBSERVED)
            self.taken[name] = dict(self.model.live)

    @rule(name=st.sampled_from(TAGS))
    def restore(self, name: str) -> None:
        if name in self.taken:
            before = dict(self.model.live)
            outcome = trio.run(self.subject.snapshots.restore, name, (), UNOBSERVED)
            assert (outcome.safety is not None) == self.model.step(self.taken[name])
            self.agrees_on_changes(outcome, before)

    @rule(name=st.sampled_from(TAGS), path=st.sampled_from(NAMES))
    def restore_a_path(self, name: str, path: str) -> None:
        then = self.taken.get(name, {})
        if name in self.taken and (path in then or path in self.model.live):
            before = dict(self.model.live)
            target = {key: value for key, value in self.model.live.items() if key != path}
            target |= {path: then[path]} if path in then else {}
            outcome = trio.run(self.subject.snapshots.restore, name, [path.encode()], UNOBSERVED)
            assert (outcome.safety is not None) == self.model.step(target)
            self.agrees_on_changes(outcome, before)

    @rule(by=st.sampled_from([-1, -1, +1]))
    def undo_or_redo(self, by: int) -> None:
        before = dict(self.model.live)
        go = self.subject.snapshots.undo if by < 0 else self.subject.snapshots.redo
        if not self.model.move(by):
            with pytest.raises(FileNotFoundError):
                trio.run(go, UNOBSERVED)
            return
        outcome = trio.run(go, UNOBSERVED)
        assert outcome.step
        assert outcome.safety
        self.agrees_on_changes(outcome, before)

    @rule(count=st.integers(1, 3))
    def run_short_of_memory(self, count: int) -> None:
        snapshots = self.subject.snapshots
        before = trio.run(snapshots.history)
        pruned = {info.serial for info in self.subject.prune(count)}
        if pruned:
            self.model.cut({at for at, state in enumerate(before.states) if state.serial in pruned})
            assert {info.serial for info in snapshots.collect_pruned()} == pruned
        assert not snapshots.collect_pruned()

    @rule()
    def serve_again(self) -> None:
        self.subject.again()

    def agrees_on_changes(self, outcome: Outcome, before: Content) -> None:
        now = self.model.live
        counts = outcome.counts
        same = {name for name in now.keys() & before.keys() if now[name] == before[name]}
        assert counts.added == len(now.keys() - before.keys())
        assert counts.removed == len(before.keys() - now.keys())
        assert counts.modified == len(now.keys() & before.keys() - same)
        assert not outcome.problems
        now |= self.written  # the counts do not include them
        self.written.clear()

    @invariant()
    def it_is_as_the_model(self) -> None:
        model = self.model
        assert self.subject.content() == model.live
        history = trio.run(self.subject.snapshots.history)
        history.check()
        assert (history.undo_steps, history.redo_steps) == (model.position, len(model.states) - 1 - model.position)
        self.subject.check()

    def teardown(self) -> None:
        """Nothing is lost: every state that a step left is a snapshot still, unless it expired."""
        states = [state for state in self.model.states if state is not None]
        recent = self.model.lost[-5:]
        kept = [self.content_of(info.name) for info in trio.run(self.subject.snapshots.infos)]
        for state in (*states, *recent):
            assert state in kept or state == self.model.live

    def content_of(self, name: str) -> Content:
        async def read() -> Content:
            async with self.subject.snapshots.tree(name, UNOBSERVED) as tree:
                return {each.decode(): tree.read(each, 0, 100) for each in names_in(tree, b"")}

        return trio.run(read)


@contextmanager
def subject_of(kind: str) -> Iterator[InVolume | InStore]:
    directory = Path(tempfile.mkdtemp(prefix="undo-"))
    try:
        if kind == "memory":
            yield InVolume(MemoryVolume())
        elif kind == "overlay":
            (directory / "below").mkdir()
            volume = OverlayVolume(os.fspath(directory / "below"))
            yield InVolume(volume)
            volume.lower.close()
        else:
            subject = InStore(directory)
            yield subject
            subject.store.close()
    finally:
        shutil.rmtree(directory)


@pytest.mark.extended
@pytest.mark.timeout(3600)  # a long run makes 2,000 histories
@pytest.mark.parametrize("kind", ["memory", "overlay", "host"])
@pytest.mark.slow
def test_undo_and_redo_go_through_the_states_of_a_model(kind: str) -> None:
    examples = settings().max_examples
    few = settings(max_examples=max(5, examples // 10), stateful_step_count=25)

    class Machine(UndoMachine):
        def __init__(self) -> None:
            self.context = subject_of(kind)
            super().__init__(self.context.__enter__())

        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                self.context.__exit__(None, None, None)

    run_state_machine_as_test(Machine, settings=few if kind == "host" else settings())
