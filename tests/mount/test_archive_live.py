"""Archives of a mounted workspace: the same bytes each time, read by unzip, and hostile ones refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.archive import records as zr
from tests.mount.programs import control, failed, succeeded, vfsd
from tests.unit.protocol.archive.archives import DIRECTORY, SYMLINK, Raw, archive, deflated, manifest, zip_of
from vfsd.client.workspace import Workspace
from vfsd.operations.snapshots import FromArchive, ImportParams, RestoreParams

MountIt = Callable[..., Workspace]


@pytest.fixture
def filled(root: Path) -> Path:
    """A workspace with one of everything."""
    (root / "dir" / "empty").mkdir(parents=True)
    (root / "dir" / "text").write_text("text\n" * 1000)
    (root / "binary").write_bytes(os.urandom(300_000))
    os.link(root / "binary", root / "dir" / "hard")
    (root / "soft").symlink_to("dir/text")
    os.mkfifo(root / "fifo")
    os.setxattr(root / "binary", "user.x", b"\xff\x00")
    with open(root / "sparse", "wb") as file:
        file.truncate(10_000_000)
    (root / "n\u00e4me with 'quotes' and spaces").touch(mode=0o751)
    (root / os.fsdecode(b"\xff\xfe")).touch()
    return root


def digest(root: Path) -> str:
    """Of everything that a program sees, times and inode numbers too."""
    seen = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        times = (info.st_mtime_ns, info.st_ctime_ns)
        facts = (info.st_ino, info.st_mode, info.st_nlink, info.st_uid, info.st_gid, info.st_size, times)
        seen.update(os.fsencode(path) + repr(facts).encode())
        if stat.S_ISREG(info.st_mode):
            seen.update(path.read_bytes() + repr([(x, os.getxattr(path, x)) for x in os.listxattr(path)]).encode())
        elif stat.S_ISLNK(info.st_mode):
            seen.update(os.fsencode(os.readlink(path)))
    return seen.hexdigest()


# -- export -------------------------------------------------------------------------------------------
def test_two_exports_of_one_state_are_the_same_bytes(
    workspace: Workspace, filled: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    workspace.snapshot("one")
    workspace.export(workdir / "1.zip")
    digest(filled)  # reading changes nothing that an archive keeps
    (filled / "dir" / "text").write_text("other")
    workspace.restore("one")
    workspace.export(workdir / "2.zip")
    succeeded(vfsd("-w", workspace.name, "export", workdir / "3.zip", "--snapshot", "one"))
    contents = [(workdir / f"{number}.zip").read_bytes() for number in (1, 2, 3)]
    assert contents[0] == contents[1] == contents[2]
    with zipfile.ZipFile(workdir / "1.zip") as file:
        assert json.loads(file.read("manifest.json"))["created_at"].startswith("1970-01-02T00:00:00")

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "tomorrow")
    assert "SOURCE_DATE_EPOCH" in failed(vfsd("-w", workspace.name, "export", workdir / "4.zip"))
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    year = str(time.gmtime().tm_year)
    workspace.export(workdir / "5.zip")
    with zipfile.ZipFile(workdir / "5.zip") as file:
        assert json.loads(file.read("manifest.json"))["created_at"] >= year


def test_unzip_accepts_an_export_and_unpacks_what_is_in_the_workspace(
    workspace: Workspace, filled: Path, workdir: Path
) -> None:
    (filled / os.fsdecode(b"\xff\xfe")).unlink()  # no name that a ZIP can say as it is
    workspace.export(workdir / "a.zip")
    tested = subprocess.run(["unzip", "-t", workdir / "a.zip"], capture_output=True, text=True, check=True)
    assert "No errors detected" in tested.stdout
    subprocess.run(["unzip", "-q", workdir / "a.zip", "-d", workdir / "out"], check=True)
    (filled / "fifo").unlink()  # a special file is in the manifest alone
    subprocess.run(["diff", "-r", "--no-dereference", filled, workdir / "out" / "files"], check=True)
    unpacked = workdir / "out" / "files"
    assert {stat.S_IMODE(p.lstat().st_mode) for p in unpacked.glob("n*")} == {0o751}
    assert os.readlink(unpacked / "soft") == "dir/text"


def test_a_file_that_is_there_is_only_replaced_with_force_and_a_failed_export_leaves_none(
    workspace: Workspace, filled: Path, workdir: Path
) -> None:
    (workdir / "a.zip").write_text("precious")
    assert "--force" in failed(vfsd("-w", workspace.name, "export", workdir / "a.zip"))
    assert (workdir / "a.zip").read_text() == "precious"
    succeeded(vfsd("-w", workspace.name, "export", workdir / "a.zip", "--force"))
    assert zipfile.is_zipfile(workdir / "a.zip")
    said = failed(vfsd("-w", workspace.name, "export", workdir / "missing" / "a.zip"))
    assert said.endswith(f"no such directory: make it with mkdir: {workdir}/missing")
    failed(vfsd("-w", workspace.name, "export", workdir / "b.zip", "--snapshot", "none"))
    assert sorted(path.name for path in workdir.iterdir()) == ["a.zip", Path(workspace.path).name]


def test_an_export_into_the_workspace_itself_is_refused(workspace: Workspace, filled: Path, workdir: Path) -> None:
    """The archive would be gone with the workspace."""
    names = sorted(path.name for path in filled.iterdir())
    directory = next(path for path in filled.iterdir() if path.is_dir())
    (workdir / "link").symlink_to(filled)
    for place in (filled / "self.zip", directory / "self.zip", workdir / "link" / "self.zip"):
        with pytest.raises(OSError, match="outside of the workspace") as caught:
            workspace.export(place)
        assert caught.value.errno == errno.EINVAL
        for flags in ((), ("--force",)):
            assert "outside of the workspace" in failed(vfsd("-w", workspace.name, "export", place, *flags))
    said = failed(vfsd("export", "self.zip", cwd=filled))
    assert str(filled / "self.zip") in said
    assert sorted(path.name for path in filled.iterdir()) == names
    (workdir / "link").unlink()


def test_a_host_workspace_can_be_exported_into_itself(workdir: Path) -> None:
    """The directory keeps the archive.  The daemon writes to its own mount: it must not wait for itself."""
    directory = workdir / "served"
    directory.mkdir()
    (directory / "a.txt").write_text("one")
    with Workspace.mount(workdir / "ws", backend=f"host:{directory}", store=workdir / "store") as workspace:
        workspace.export(Path(workspace.path) / "self.zip")
        with zipfile.ZipFile(Path(workspace.path) / "self.zip") as file:
            assert not any("self.zip" in name or ".tmp" in name for name in file.namelist())
    assert sorted(path.name for path in directory.iterdir()) == ["a.txt", "self.zip"]


def test_names_that_restore_would_take_for_files_are_refused(workspace: Workspace) -> None:
    for name in ("x.zip", "X.ZIP", ".", "..", "..."):
        with pytest.raises(OSError, match="is not a snapshot name: "):
            workspace.snapshot(name)


def test_what_does_not_exist_is_named_as_it_was_typed(workspace: Workspace, filled: Path, workdir: Path) -> None:
    workspace.snapshot("one")
    assert failed(vfsd("-w", workspace.name, "diff", "one", "--", "nopath")).endswith("directory: nopath")
    (filled / "binary").write_bytes(b"")
    workspace.restore("one")
    said = failed(vfsd("-w", workspace.name, "restore", "--undo", "one"))
    assert said.endswith("no such path (--undo takes paths; to restore a snapshot: vfsd restore one): one")
    (workdir / "other").mkdir()
    options = ("--of", f"host:{workdir}/other", "--store", workdir / "store")
    said = failed(vfsd("-w", workspace.name, "restore", "one", *options))
    assert f"has no snapshots of host:{workdir}/other; --of takes host:DIR" in said
    with Workspace.mount(workdir / "mnt2", backend=f"host:{workdir}/other", store=workdir / "store") as other:
        other.snapshot("before")
    said = failed(vfsd("-w", workspace.name, "restore", "befor", *options))
    assert said.endswith(f"no such snapshot of host:{workdir}/other: befor; did you mean before?")


def test_an_archive_in_the_workspace_can_be_imported(workspace: Workspace, filled: Path, workdir: Path) -> None:
    """The daemon reads from its own mount: it must not wait for itself."""
    workspace.export(workdir / "self.zip")
    shutil.copy(workdir / "self.zip", filled)
    (filled / "binary").unlink()
    workspace.import_archive(filled / "self.zip")
    assert (filled / "binary").stat().st_size == 300_000


# -- import -------------------------------------------------------------------------------------------
X = Raw(b"files/a", b"x")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "leads upwards": (archive(Raw(b"files/../../etc/passwd", b"x")), "files/../../etc/passwd"),
    "absolute": (archive(Raw(b"/etc/passwd", b"x")), "/etc/passwd"),
    "NUL": (archive(Raw(b"files/a\0b", b"x")), "files/a"),
    "meant for a terminal": (archive(Raw(b"files/../\x1b[31mred", b"x")), "files/.."),
    "twice": (archive(X, Raw(b"files/a", b"y")), "files/a"),
    "below a symlink": (archive(Raw(b"files/l", b"/etc", SYMLINK), Raw(b"files/l/passwd", b"x")), "files/l"),
    "bad CRC": (archive(Raw(b"files/a", b"x", crc=1)), "files/a"),
    "bomb": (archive(deflated(b"files/bomb", b"x" * 99, size=1 << 30)), "files/bomb"),
    "lies about its size": (archive(deflated(b"files/liar", bytes(5_000_000), size=10)), "files/liar"),
    "encrypted": (archive(Raw(b"files/a", b"x", flags=zr.FLAG_UTF8 | 1)), "files/a"),
    "unknown version": (zip_of([manifest(1, 1, version="9"), X]), "version"),
    "counts that are wrong": (zip_of([manifest(5, 1), X]), "manifest"),
    "no manifest": (zip_of([X]), "manifest"),
    "a file below a file": (archive(X, Raw(b"files/a/b", b"y")), "files/a"),
    "cut off": (archive(X, Raw(b"files/d/", mode=DIRECTORY))[:-40], "truncated"),
    "no archive": (b"this is no archive" * 100, "ZIP"),
}


@pytest.mark.extended
def test_every_hostile_archive_is_refused_with_its_own_error_and_nothing_changes(
    workspace: Workspace, filled: Path, workdir: Path
) -> None:
    before = digest(filled)
    messages = set()
    for case, (data, names) in HOSTILE.items():
        path = workdir / "hostile.zip"
        path.write_bytes(data)
        with control(workspace.name) as client:
            for method, params in (
                ("import", ImportParams(str(path))),
                ("restore", RestoreParams(FromArchive(str(path)))),
            ):
                with pytest.raises(OSError, match=re.escape(names)):
                    client.call(method, params)
        messages.add(failed(vfsd("-w", workspace.name, "import", path)))
        assert all(message.isprintable() for message in messages), messages
        assert digest(filled) == before, case
        assert workspace.snapshots() == [], case
    assert len(messages) == len(HOSTILE)
    assert sorted(os.listdir(workdir)) == sorted([Path(workspace.path).name, "hostile.zip"])


def test_an_archive_that_unpacks_to_more_than_there_is_room_for_is_refused_in_little_memory(
    mount: MountIt, workdir: Path
) -> None:
    (workdir / "bomb.zip").write_bytes(archive(deflated(b"files/bomb", b"x" * (200 << 20))))
    workspace = mount(max_bytes=8 << 20)
    (Path(workspace.path) / "kept").touch()
    before = peak_bytes(workspace.pid)
    for bring_in in (workspace.import_archive, workspace.restore):
        with pytest.raises(OSError, match="No space left") as raised:
            bring_in(workdir / "bomb.zip")
        assert raised.value.filename == str(workdir / "bomb.zip")
    assert peak_bytes(workspace.pid) - before < 64 << 20
    assert os.listdir(workspace.path) == ["kept"]
    assert workspace.snapshots() == []


def peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def test_an_import_while_a_file_is_in_the_way_of_a_directory_is_all_or_nothing(
    workspace: Workspace, root: Path, workdir: Path
) -> None:
    (root / "a").mkdir()
    (root / "a" / "in").write_text("x")
    (root / "b").write_text("b")
    (workdir / "x.zip").write_bytes(archive(Raw(b"files/a", b"file"), Raw(b"files/b/c", b"below")))
    before = digest(root)
    try:
        workspace.import_archive(workdir / "x.zip")
    except OSError:
        assert digest(root) == before
        assert workspace.snapshots() == []
    else:
        assert (root / "a").read_text() == "file"
        assert (root / "b" / "c").read_text() == "below"
        workspace.undo()
        assert (root / "a" / "in").read_text() == "x"
        assert (root / "b").read_text() == "b"
