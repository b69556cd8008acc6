"""Random edits above and below: apply removes nothing that others wrote after the workspace changed the path."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.backends.overlay import OverlayVolume
from protocol.testing.volume.driver import Driver
from tests.unit.protocol.backends.overlay.killed_apply import WORKER
from tests.unit.protocol.backends.overlay.test_apply import run

PATHS = (b"a", b"b", b"d", b"d/a", b"d/b")
ABOVE = (
    "truncate",
    "write",
    "over",
    "unlink",
    "chmod",
    "xattr",
    "rmdir",
    "mkdir",
    "create",
    "look",
    "snapshot",
    "apply",
)
BELOW = ("write", "over", "unlink", "rmdir", "mkdir", "tidy")
EDITS = st.one_of(
    st.tuples(st.just("above"), st.sampled_from(ABOVE), st.sampled_from(PATHS)),
    st.tuples(st.just("below"), st.sampled_from(BELOW), st.sampled_from(PATHS)),
)
_TOKENS = itertools.count(1)


def token() -> bytes:
    return b"%08d" % next(_TOKENS)  # of one size, so that only the times tell


def outlast_tick(root: Path) -> None:
    """Wait until a file that is made now has another time than everything before."""
    probe = root / "probe"
    probe.touch()
    first = now = probe.stat().st_ctime_ns
    while now == first:
        time.sleep(0.001)
        probe.touch()
        now = probe.stat().st_ctime_ns


class Both:
    """A workspace over a directory, and who wrote what there after the workspace had changed it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.below = scratch / "below"
        (self.below / "d").mkdir(parents=True)
        for path in (b"a", b"b", b"d/a"):
            self.at(path).write_bytes(token())
        self.volume = OverlayVolume(os.fsencode(self.below))
        self.fs = Driver(self.volume, WORKER)
        self.changed: set[bytes] = set()
        self.remade: set[bytes] = set()  # of these, the paths whose entries are changed too, if they are directories
        self.theirs: set[bytes] = set()

    def at(self, path: bytes) -> Path:
        return self.below / os.fsdecode(path)

    def contents(self) -> set[bytes]:
        return {path.read_bytes() for path in self.below.rglob("*") if path.is_file() and not path.is_symlink()}

    def above(self, what: str, path: bytes) -> None:
        """One change in the workspace, where it can be made."""
        if what == "look":
            self.fs.hold(path)
            return
        if what == "snapshot":
            self.volume.take_snapshot(token().decode())
            return
        if what == "rmdir":
            self.empty(path)
        elif what in ("mkdir", "create", "over"):
            self.make(what, path)
        else:
            self.edit(what, path)
        self.changed.add(path)
        if what not in ("chmod", "xattr"):
            self.remade.add(path)

    def empty(self, path: bytes) -> None:
        for name in self.fs.names(path):
            self.fs.unlink(path + b"/" + name)
            self.changed.add(path + b"/" + name)
        self.fs.rmdir(path)

    def make(self, what: str, path: bytes) -> None:
        if what == "mkdir":
            self.fs.directory(path)
        elif what == "create":
            self.fs.file(path, token())
        else:
            other = b"new" + token()
            self.fs.file(other, token())
            self.fs.rename(other, path)

    def edit(self, what: str, path: bytes) -> None:
        if what == "truncate":
            self.fs.set(path, size=0)
            self.volume.write(self.fs.at(path), 0, token())
        elif what == "write":
            self.volume.write(self.fs.at(path), 2, b"xy")
        elif what == "chmod":
            self.fs.set(path, mode=0o700)  # with search permission, which a plain user needs
        elif what == "xattr":
            self.volume.setxattr(self.fs.at(path), b"user.x", token(), 0)
        else:
            self.fs.unlink(path)

    def others(self, what: str, path: bytes) -> None:
        """One change below by others."""
        place = self.at(path)
        if what == "tidy":
            self.volume.tidy()  # begins a round, or ends one
            self.volume.tidy()
        elif what in ("write", "over"):
            written = token()
            if what == "write":
                with open(place, "r+b" if place.exists() else "xb") as file:
                    file.write(written)
            else:
                other = self.scratch / "other"
                other.write_bytes(written)
                other.rename(place)
            if path in self.changed or any(path.startswith(each + b"/") for each in self.remade):
                self.theirs.add(written)
        elif what == "unlink":
            gone = place.read_bytes()
            place.unlink()
            self.theirs.discard(gone)
        elif what == "rmdir":
            place.rmdir()
        else:
            place.mkdir()
        self.theirs &= self.contents()  # what others themselves have replaced

    def apply(self) -> None:
        before = set(self.below.rglob("*")), self.contents()
        try:
            done = run(self.volume)
        finally:
            assert self.theirs <= self.contents(), "others' work is lost"
        if done.conflicts:
            assert (set(self.below.rglob("*")), self.contents()) == before, "written in spite of conflicts"
        else:
            self.changed.clear()
            self.remade.clear()
            self.theirs.clear()


def _noticed(how: str) -> list[tuple[str, str, bytes]]:
    """Edits of `a`, which the daemon keeps and looks at between the change below and the apply."""
    return [("above", "look", b"a"), ("above", how, b"a"), ("below", "write", b"a"), ("below", "tidy", b"a")]


@settings(deadline=None)
@example(_noticed("truncate"))
@example(_noticed("over"))
@example(_noticed("unlink"))
@example([("above", "chmod", b"d"), ("below", "write", b"d/a"), ("above", "truncate", b"d/a")])
@given(st.lists(EDITS, min_size=3, max_size=14))
def test_apply_replaces_nothing_that_was_written_below_after_the_workspace_changed_it(
    edits: list[tuple[str, str, bytes]],
) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-loses-nothing-"))
    try:
        both = Both(scratch)
        for side, what, path in edits:
            outlast_tick(scratch)
            if what == "apply":
                both.apply()
                continue
            try:
                if side == "above":
                    both.above(what, path)
                else:
                    both.others(what, path)
            except OSError:
                continue  # cannot be done to what is there now
            finally:
                both.volume.check_invariants()
        outlast_tick(scratch)
        both.apply()
    finally:
        shutil.rmtree(scratch)
