"""Times of files after a restore, discard, apply or merge: as recorded, with a count of what got older, or `touch`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt
from tests.mount.programs import vfsd

OLD_NS = 1_700_000_000 * 10**9 + 1
NEW_NS = OLD_NS + 60 * 10**9


def put(place: Path, content: str, time_ns: int) -> None:
    place.write_text(content)
    os.utime(place, ns=(time_ns, time_ns))


def mtime(place: Path) -> int:
    return place.stat().st_mtime_ns


@pytest.mark.parametrize("kind", ["memory", "host"])  # the volume's own snapshots, and those in a store
def test_a_restore_counts_what_got_older_and_touch_gives_it_one_present_time(
    mount: MountIt, workdir: Path, kind: str
) -> None:
    (workdir / "d").mkdir()
    workspace = mount(backend=kind if kind == "memory" else f"host:{workdir / 'd'}")
    root = Path(workspace.path)
    for name in ("back", "same-second", "gone", "equal"):
        put(root / name, "1", OLD_NS)
    put(root / "forward", "1", NEW_NS)
    workspace.snapshot("s1")
    put(root / "back", "2", NEW_NS)
    put(root / "same-second", "2", OLD_NS + 1)
    put(root / "forward", "2", OLD_NS)
    put(root / "equal", "1", NEW_NS)
    (root / "gone").unlink()
    before = {each.name: mtime(each) for each in root.iterdir()}
    paths = [str(root / name) for name in ("back", "same-second", "forward", "equal", "gone")]
    said = vfsd("restore", "s1", *paths, "-w", workspace.name).stdout
    assert (
        "2 files are older than what they replaced; build tools may not notice: `--touch`, after `vfsd restore --undo`"
        in said
    )
    assert {mtime(root / name) for name in ("back", "same-second", "gone", "equal")} == {OLD_NS}
    assert workspace.undo(paths).older == 1  # "forward"
    assert {each.name: mtime(each) for each in root.iterdir()} == before
    assert "older" not in vfsd("restore", "s1", "-w", workspace.name).stdout, "the objects came back, too"
    workspace.undo()
    assert {each.name: mtime(each) for each in root.iterdir()} == before
    assert workspace.restore("s1", touch=True).older == 0
    (present,) = {mtime(root / name) for name in ("back", "same-second", "forward", "gone")}
    assert present not in (OLD_NS, NEW_NS)
    assert mtime(root / "equal") == OLD_NS
    assert (root / "back").read_text() == "1"
    workspace.undo()
    assert {each.name: mtime(each) for each in root.iterdir()} == before, "the exact times"


def test_a_file_that_was_discarded_with_touch_is_newer_and_no_change(mount: MountIt, workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    for name in ("discarded", "applied"):
        put(below / name, "1", OLD_NS)
    workspace = mount(backend=f"overlay:{below}")
    root = Path(workspace.path)
    for name in ("discarded", "applied"):
        put(root / name, "2", NEW_NS)
    assert workspace.discard([root / "discarded"]).older == 1
    workspace.undo()
    assert mtime(root / "discarded") == NEW_NS
    assert workspace.discard([root / "discarded"], touch=True).older == 0
    present = mtime(root / "discarded")
    assert present not in (OLD_NS, NEW_NS)
    assert [change.path for change in workspace.diff().changes] == ["applied"]
    put(root / "applied", "2", OLD_NS - 1)
    applied = workspace.apply(touch=True)
    assert ([change.path for change in applied.changes], applied.older) == (["applied"], 0)
    assert mtime(below / "applied") == mtime(root / "applied") > present
    assert mtime(below / "discarded") == OLD_NS
    assert not workspace.diff()
    put(root / "applied", "3", OLD_NS)
    assert workspace.apply().older == 1
    put(root / "applied", "4", NEW_NS)
    workspace.discard([root / "applied"], touch=True)
    assert mtime(root / "applied") > mtime(below / "applied")
    assert not workspace.diff()
    assert not workspace.apply(dry_run=True).changes


def test_a_merge_counts_what_got_older_and_touch_gives_it_the_present_time(mount: MountIt, workdir: Path) -> None:
    workspace = mount()
    root = Path(workspace.path)
    put(root / "file", "1", NEW_NS)
    with workspace.fork(workdir / "fork") as fork:
        put(Path(fork.path) / "file", "2", OLD_NS)
        assert workspace.merge(fork).older == 1
        assert mtime(root / "file") == OLD_NS
        workspace.undo()
        assert workspace.merge(fork, touch=True).older == 0
        assert mtime(root / "file") not in (OLD_NS, NEW_NS)
        workspace.undo()
        assert mtime(root / "file") == NEW_NS
        assert workspace.adopt(fork, force=True, touch=True).older == 0
