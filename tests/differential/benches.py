"""The benches of the backends over a directory: that directory is a tmpfs too, so it must answer as one by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.differential.calls import Call, random_calls
from tests.differential.compare import MAX_BYTES, Bench
from tests.differential.known import Difference
from tests.support.lower_layers import Layer, make
from vfsd.client.workspace import Workspace

_LARGEST: Final = 16 << 20
_ABOUT_HOLES: Final = frozenset({"seek_sparse", "map_read", "map_private"})  # sparse files are not mapped
__all__ = ["BENCHES", "HostBench", "OverlayBench"]

_EPISODES: Final = 20_000  # that an overlay's bench has directories for
_PREPARED_SHARE: Final = 0.8  # of its episodes in which there is something below


def _mounted_below(stack: contextlib.ExitStack, directory: Path) -> Path:
    """A tmpfs for a backend to stand on."""
    under = directory / "under"
    under.mkdir()
    options = f"nosuid,nodev,mode=755,nr_inodes=1000000,size={MAX_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "under", str(under)], check=True)
    stack.callback(subprocess.run, ["umount", "-l", str(under)], check=True)
    return under


class HostBench(Bench):
    """Beside the oracle, a mount of a host directory."""

    def _mount_vfsd(self, stack: contextlib.ExitStack) -> str:
        under, place = _mounted_below(stack, self._directory), self._directory / "vfsd"
        place.mkdir()
        name = f"diff-host-{self._directory.name}-{os.getpid()}"
        self.workspace = stack.enter_context(
            Workspace.mount(place, f"host:{under}", engine=self.engine, name=name, allow_other=True)  # type: ignore[arg-type]
        )
        return str(place)

    def _unknown(self, call: Call, difference: Difference) -> bool:
        return not _is_a_matter_of_clocks(difference) and super()._unknown(call, difference)


def _is_a_matter_of_clocks(difference: Difference) -> bool:
    """What a root daemon makes it gives to the caller afterwards: its ctime is a little later than its mtime.

    And tmpfs's clock ticks every 4 ms for an inode that nobody has looked at since it changed last, as those
    of the directory below the mount: two changes look like one then (fs/inode.c, current_time).
    """
    if "order of times" in difference.what:
        return True
    return "time" in difference.what and {difference.tmpfs, difference.mount} == {"now", "same"}


class OverlayBench(Bench):
    """Beside the oracle, a mount of an overlay.

    The calls of an episode that come before "below" are made in the directory below, in which nobody has looked by
    then, and on the oracle; those after it through the mount.  Each episode has an empty directory below of its own,
    which was there when the overlay was mounted.
    """

    _reserved = False  # whether fallocate was called below, in this episode

    def _mount_vfsd(self, stack: contextlib.ExitStack) -> str:
        self._under = _mounted_below(stack, self._directory)
        for number in range(1, _EPISODES + 1):
            os.mkdir(self._below(number))
            os.chmod(self._below(number), 0o777)
        place = self._directory / "vfsd"
        place.mkdir()
        name = f"diff-overlay-{self._directory.name}-{os.getpid()}"
        self.workspace = stack.enter_context(
            Workspace.mount(
                place, f"overlay:{self._under}", engine=self.engine, name=name,  # type: ignore[arg-type]
                max_bytes=MAX_BYTES, allow_other=True, cache=self.cache,
            )
        )  # fmt: skip
        return str(place)

    def _below(self, number: int) -> Path:
        return self._under / f"run-{number}"

    def calls(self, chance: random.Random, count: int) -> list[Call]:
        """See `Bench.calls`."""
        if chance.random() > _PREPARED_SHARE:
            return super().calls(chance, count)
        before = random_calls(chance, count // 2, self.without)
        return self._offered([*before, Call(0, "below", ()), *random_calls(chance, count // 2, self.without)])

    @contextlib.contextmanager
    def _roots(self) -> Iterator[list[str]]:
        self._episodes += 1
        assert self._episodes <= _EPISODES, "no directory below is left for another episode"
        below = self._below(self._episodes)
        oracle, mount = (os.path.join(root, below.name) for root in (self.tmpfs, self.mount))
        os.mkdir(oracle)
        os.stat(oracle)  # else tmpfs takes the coarse clock for the next line, and its times do not differ
        os.chmod(oracle, 0o777)
        try:
            yield [oracle, mount]
        finally:
            for place in (oracle, mount, below):
                shutil.rmtree(place)

    def _compare_in(self, roots: Sequence[str], calls: Sequence[Call], tree_every: int | None) -> Difference | None:
        self._reserved = False
        marks = [number for number, call in enumerate(calls) if call.operation == "below"]
        if not marks:
            return super()._compare_in(roots, calls, tree_every)
        first = marks[-1] + 1
        self._reserved = any(call.operation == "fallocate" for call in calls[:first])
        for root in (roots[0], str(self._below(self._episodes))):
            self._make(root, calls[:first])
        found = super()._compare_in(roots, calls[first:], tree_every)
        return found and dataclasses.replace(found, index=found.index + first)

    def _unknown(self, call: Call, difference: Difference) -> bool:
        return not self._is_of_below(difference) and super()._unknown(call, difference)

    def _is_of_below(self, difference: Difference) -> bool:
        """What is below takes no memory above, and was made in another tick of the clock than on the oracle.

        And SEEK_DATA, by which an overlay learns what is below, does not tell what was reserved from a hole: it is
        in st_blocks until something of the file is changed, and cutting it at its own size is no change.
        """
        if difference.what == "statfs" or "order of times" in difference.what:
            return True
        return self._reserved and difference.what.endswith(": blocks")


class LayerBench(OverlayBench):
    """The same over an archive or a stored snapshot of the directory, which each episode makes and mounts."""

    layer: Layer

    def _mount_vfsd(self, stack: contextlib.ExitStack) -> str:
        self._under = _mounted_below(stack, self._directory)
        (self._directory / "vfsd").mkdir()
        self._mounts = stack.enter_context(contextlib.ExitStack())
        self._mount_layer()
        return str(self._directory / "vfsd")

    def _mount_layer(self) -> None:
        """Mount what is in the directory now."""
        self._mounts.close()
        self._layers = getattr(self, "_layers", 0) + 1
        place = self._directory / f"layer-{self._layers}.zip"
        make(self.layer, self._under, place)
        backend, options = f"overlay:{place}", {}
        if self.layer == "snapshot":
            backend, options = "overlay:snapshot:below", {"store": place}
        self.workspace = self._mounts.enter_context(
            Workspace.mount(
                self._directory / "vfsd", backend, engine=self.engine,  # type: ignore[arg-type]
                name=f"diff-{self.layer}-{self._directory.name}-{os.getpid()}-{self._layers}",
                max_bytes=MAX_BYTES, allow_other=True, cache=self.cache, **options,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def _roots(self) -> Iterator[list[str]]:
        below = self._below(self._episodes + 1)
        below.mkdir()
        below.chmod(0o777)
        self._mount_layer()
        with super()._roots() as roots:
            yield roots

    def _make(self, root: str, calls: Sequence[Call]) -> None:
        super()._make(root, calls)
        _cut_files(root)
        if not root.startswith(self.tmpfs):
            self._mount_layer()

    def _unknown(self, call: Call, difference: Difference) -> bool:
        """Layers know no holes, and no times other than the mtime."""
        of_holes = difference.what.endswith("blocks") or call.operation in _ABOUT_HOLES
        return not of_holes and "time" not in difference.what and super()._unknown(call, difference)


def _cut_files(root: str) -> None:
    """Cut the files that are too large, if mostly holes, for an archive or for the file system of a store."""
    for above, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(above, name)
            seen = os.lstat(path)
            if stat.S_ISREG(seen.st_mode) and seen.st_size > _LARGEST:
                os.truncate(path, _LARGEST)


class ArchiveBench(LayerBench):
    """See `LayerBench`."""

    layer = "archive"


class SnapshotBench(LayerBench):
    """See `LayerBench`."""

    layer = "snapshot"


BENCHES: Final[Mapping[str, type[Bench]]] = {
    "memory": Bench, "host": HostBench, "overlay": OverlayBench, "archive": ArchiveBench, "snapshot": SnapshotBench
}  # fmt: skip
