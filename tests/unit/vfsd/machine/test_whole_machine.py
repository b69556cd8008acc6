"""Which parts of the machine an overlay of `/` takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vfsd.machine import whole_machine
from vfsd.machine.mountinfo import parse_mountinfo
from vfsd.machine.whole_machine import LEFT_OUT, machine_parts

REPOSITORY = Path(__file__).parents[4]


def _parts(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[str, str]) -> whole_machine.MachineParts:
    lines = [
        f"{number} 1 0:{number} / {path} rw - {kind} source rw" for number, (path, kind) in enumerate(mounts, start=20)
    ]
    found = parse_mountinfo("\n".join(lines).encode())
    monkeypatch.setattr(whole_machine, "mounts", lambda: found)
    return machine_parts("/home/user/mount")


def test_local_file_systems_are_in_the_overlay_and_others_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts(
        monkeypatch,
        ("/", "ext4"),
        ("/proc", "proc"),
        ("/dev/shm", "tmpfs"),
        ("/home", "xfs"),
        ("/home/user/net", "nfs4"),
        ("/home/user/net/disk", "ext4"),
        ("/home/user/mount", "fuse.vfsd"),
        ("/srv/old", "ext4"),
        ("/srv", "cifs"),
        ("/tmp/any", "ext4"),
    )
    assert parts.overlaid == ("/home",), "not what is in a read-only one, or covered by a later mount"
    assert parts.read_only == ("/home/user/net", "/srv")
    assert not {"/proc", "/home/user/net", "/srv"}.difference(parts.closed)


def test_a_mount_at_the_same_place_covers_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts(monkeypatch, ("/", "ext4"), ("/data", "ext4"), ("/data/in", "ext4"), ("/data", "nfs"))
    assert (parts.overlaid, parts.read_only) == ((), ("/data",))


def test_what_programs_change_all_the_time_and_vfsds_own_files_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(whole_machine, "_SHARED", ("/dev",))  # not /tmp, where this home is
    profile = tmp_path / ".mozilla"
    profile.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own = os.path.realpath(tmp_path / "vfsd")
    os.makedirs(f"{own}/journals")
    parts = _parts(monkeypatch, ("/", "ext4"))
    assert {"/var/log", os.path.realpath(profile)}.issubset(parts.left_out)
    assert own in parts.closed
    assert ("empty", own) in parts.steps("/home/user/mount", private_tmp=False)
    page = (REPOSITORY / "docs/system.md").read_text()
    assert [path for path in LEFT_OUT if f"`{path.removeprefix('~/')}`" not in page] == []
