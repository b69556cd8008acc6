"""HostFilesystem: nothing leads outside its root, also while other programs change it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import HostFilesystem, HostMount, InMemoryFilesystem
from protocol.adapters.host_files import HostFiles
from protocol.testing.filesystem import contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return tmp_path / "root"


@pytest.fixture
def filesystem(root: Path) -> HostFilesystem:
    return HostFilesystem(root)


def outside(root: Path) -> list[str]:
    return sorted(path.name for path in (root.parent / "outside").iterdir())


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("durable", [False, True])
def test_only_a_durable_filesystem_syncs_each_write_and_its_name(
    root: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    filesystem = HostFilesystem(root, durable=durable)

    filesystem.write("new/file", "one", mode="create")
    filesystem.write("new/file", " two", mode="append")

    file, directory = str(root / "new" / "file"), str(root / "new")
    assert synced == ([str(root), file, directory, file] if durable else [])
    synced.clear()
    filesystem.write("new/file", "three")
    filesystem.mkdir("new/made")

    assert [path for path in synced if not os.path.basename(path).startswith(".vfsd-")] == (
        [directory, directory] if durable else []
    )
    assert len(synced) == (3 if durable else 0)
    assert filesystem.read("new/file").content == "three"


@pytest.mark.parametrize(
    "target", ["../outside", "{outside}", "inside/../../outside", "/..{outside}", "hop", "/proc/self/root{outside}"]
)
def test_a_symlink_that_leads_outside_is_refused_by_every_call(
    root: Path, filesystem: HostFilesystem, target: str
) -> None:
    (root / "inside").mkdir()
    (root / "hop").symlink_to("../outside")
    (root / "link").symlink_to(target.format(outside=root.parent / "outside"))
    calls: list[Any] = [
        lambda: filesystem.read("link/secret"),
        lambda: filesystem.read_bytes("link/secret"),
        lambda: filesystem.stat("link/secret"),
        lambda: filesystem.list("link"),
        lambda: filesystem.glob("*", path="link"),
        lambda: filesystem.grep("secret", path="link"),
        lambda: filesystem.write("link/secret", "x"),
        lambda: filesystem.write("link/new", "x"),
        lambda: filesystem.write("link/new/deep", "x"),
        lambda: filesystem.mkdir("link/new"),
        lambda: filesystem.delete("link/secret"),
        lambda: filesystem.open_read("link/secret"),
        lambda: filesystem.open_write("link/secret", mode="append"),
    ]

    for call in calls:
        with pytest.raises(PermissionError, match="outside the root"):
            call()

    assert not filesystem.exists("link/secret")
    assert filesystem.glob("secret") == []
    assert list(filesystem.grep("secret")) == []
    assert outside(root) == ["secret"]
    assert (root.parent / "outside" / "secret").read_text() == "secret"


def test_deleting_a_tree_does_not_follow_its_symlinks(root: Path, filesystem: HostFilesystem) -> None:
    (root / "d").mkdir()
    (root / "d" / "link").symlink_to("../../outside")

    assert filesystem.delete("d", recursive=True) == 2
    assert outside(root) == ["secret"]


def test_absolute_symlinks_below_the_root_stay_inside(root: Path, filesystem: HostFilesystem) -> None:
    filesystem.write("d/file", "inside")
    (root / "link").symlink_to(root / "d")

    assert filesystem.read("link/file").content == "inside"
    filesystem.write("link/file", "through the link")
    assert (root / "d" / "file").read_text() == "through the link"
    assert (root / "link").is_symlink()


def test_a_root_that_is_reached_through_a_symlink_is_a_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    filesystem = HostFilesystem(tmp_path / "alias")

    filesystem.write("file", "x")

    assert (root / "file").read_text() == "x"
    assert filesystem.root == str(root)


def test_what_swaps_a_directory_for_a_symlink_meanwhile_leads_nobody_out(
    root: Path, filesystem: HostFilesystem
) -> None:
    (root / "d").mkdir()
    (root / "d" / "secret").write_text("inside")
    (root / "link").symlink_to("../outside")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(root / "d", root / "real")
            os.rename(root / "link", root / "d")
            os.rename(root / "d", root / "link")
            os.rename(root / "real", root / "d")

    seen = set()
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(200):
            for call in (
                lambda: seen.add(filesystem.read("d/secret").content),
                lambda number=number: filesystem.write(f"d/new-{number % 5}", "x", create_parents=False),
                lambda: filesystem.write("d/secret", "inside", create_parents=False),
            ):
                with contextlib.suppress(OSError):
                    call()
    finally:
        done.set()
        thread.join()

    assert seen <= {"inside"}
    assert outside(root) == ["secret"]
    assert (root.parent / "outside" / "secret").read_text() == "secret"


def test_no_call_leaves_a_descriptor_open(root: Path, filesystem: HostFilesystem, tmp_path: Path) -> None:
    before = descriptors()

    filesystem.write("d/e/file", "x")
    filesystem.write("d/e/file", "x", mode="append")
    (root / "link").symlink_to("d/../d/e")
    filesystem.read("link/file")
    filesystem.list("link")
    filesystem.glob("**")
    filesystem.grep("x")
    for wrong in ("missing", "d", "d/e/file/below"):
        with pytest.raises(OSError, match=wrong):
            filesystem.read(wrong)
    with pytest.raises(FileExistsError):
        filesystem.write("d/e/file", "x", mode="create")
    filesystem.export_archive(tmp_path / "a.zip")
    filesystem.import_archive(tmp_path / "a.zip")
    filesystem.delete("d", recursive=True)

    assert descriptors() <= before  # objects of other tests may have closed theirs


def test_an_overwritten_file_keeps_its_mode_and_owner(root: Path, filesystem: HostFilesystem) -> None:
    (root / "run.sh").write_text("old")
    (root / "run.sh").chmod(0o751)

    filesystem.write("run.sh", "new")

    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o751
    assert (root / "run.sh").read_text() == "new"
    assert os.listdir(root) == ["run.sh"]


def test_a_new_file_has_the_mode_of_the_umask(root: Path, filesystem: HostFilesystem) -> None:
    before = os.umask(0o027)
    try:
        filesystem.write("d/overwritten", "x")
        filesystem.write("d/created", "x", mode="create")
    finally:
        os.umask(before)

    assert [stat.S_IMODE(path.stat().st_mode) for path in sorted((root / "d").iterdir())] == [0o640, 0o640]
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o750


def test_a_fifo_keeps_nobody_waiting(root: Path, filesystem: HostFilesystem) -> None:
    os.mkfifo(root / "fifo")

    for call in (filesystem.read, filesystem.open_read, filesystem.open_write):
        with pytest.raises(OSError, match="Not a regular file"):
            call("fifo")
    assert [(each.is_file, each.is_directory) for each in filesystem.list()] == [(False, False)]
    assert list(filesystem.grep("x")) == []


@pytest.fixture
def most_descriptors() -> Iterator[int]:
    """How many descriptors this process may have: some more than it has."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = max(map(int, os.listdir("/proc/self/fd"))) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard_limit))
    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def test_a_deeper_tree_than_there_are_descriptors_is_read_and_deleted(
    root: Path, filesystem: HostFilesystem, most_descriptors: int
) -> None:
    depth = most_descriptors + 50
    node = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=node)
        below = os.open("d", os.O_RDONLY, dir_fd=node)
        os.close(node)
        node = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=node))
    os.close(node)

    assert filesystem.stat("d/" * depth + "file").is_file
    assert filesystem.delete("d", recursive=True) == depth + 1


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(FileNotFoundError):
        HostFilesystem(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        HostFilesystem(tmp_path / "file")


def test_an_import_keeps_what_is_equal_and_links_what_was_linked(root: Path, tmp_path: Path) -> None:
    filesystem = HostFilesystem(root)
    filesystem.write("kept", "x")
    filesystem.write("one", "linked")
    os.link(root / "one", root / "two")
    (root / "link").symlink_to("nowhere")
    os.utime(root / "kept", ns=(1, 1_234_567_890_123_456_789))
    filesystem.export_archive(tmp_path / "a.zip")
    inode = (root / "kept").stat().st_ino
    (root / "two").unlink()
    (root / "two").write_text("linked")
    (root / "link").unlink()

    filesystem.import_archive(tmp_path / "a.zip")

    kept = (root / "kept").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (inode, 1_234_567_890_123_456_789)
    assert (root / "one").stat().st_ino == (root / "two").stat().st_ino
    assert os.readlink(root / "link") == "nowhere"


def test_an_import_sets_extended_attributes(root: Path, tmp_path: Path) -> None:
    filesystem = HostFilesystem(root)
    filesystem.write("file", "x")
    try:
        os.setxattr(root / "file", "user.note", b"mine")
    except OSError as error:
        pytest.skip(f"the temporary directory has no extended attributes of users: {error}")
    filesystem.export_archive(tmp_path / "a.zip")
    os.setxattr(root / "file", "user.note", b"changed")
    os.setxattr(root / "file", "user.other", b"new")

    filesystem.import_archive(tmp_path / "a.zip")

    assert {name: os.getxattr(root / "file", name) for name in os.listxattr(root / "file")} == {"user.note": b"mine"}


def test_an_import_breaks_links_that_the_archive_does_not_have(root: Path, tmp_path: Path) -> None:
    filesystem = HostFilesystem(root)
    filesystem.write("one", "same")
    filesystem.write("two", "same")
    filesystem.export_archive(tmp_path / "a.zip")
    (root / "two").unlink()
    os.link(root / "one", root / "two")

    filesystem.import_archive(tmp_path / "a.zip")

    assert (root / "one").stat().st_ino != (root / "two").stat().st_ino


# -- hydration ---------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for path in ("a.py", "src/b.py", "src/b.txt", ".git/config", "src/node_modules/x/y.js", "empty/.keep"):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(f"content of {path}")
    (project / "empty" / ".keep").unlink()
    (project / "a.py").chmod(0o755)
    os.utime(project / "a.py", ns=(1, 1_234_567_890_123_456_789))
    (project / "link").symlink_to("src/b.py")
    os.mkfifo(project / "fifo")
    return project


def paths(filesystem: InMemoryFilesystem) -> list[str]:
    return sorted(path for path, content in contents(filesystem).items() if content is not None)


def test_a_memory_filesystem_begins_with_the_hosts_files(project: Path) -> None:
    filesystem = InMemoryFilesystem(mounts=[HostMount(project, "work/here")])

    assert paths(filesystem) == [
        f"work/here/{path}"
        for path in (".git/config", "a.py", "link", "src/b.py", "src/b.txt", "src/node_modules/x/y.js")
    ]
    seen = filesystem.stat("work/here/a.py")
    assert stat.S_IMODE(seen.mode) == 0o755
    assert seen.modified_at is not None
    assert seen.modified_at.year == 2009
    assert filesystem.stat("work/here/link").is_symlink
    assert filesystem.is_dir("work/here/empty")
    filesystem.volume.check_invariants()  # type: ignore[attr-defined]


def test_a_hydrated_file_is_a_copy(project: Path) -> None:
    filesystem = InMemoryFilesystem(mounts=[HostMount(project)])

    filesystem.write("a.py", "changed")
    (project / "src" / "b.py").write_text("changed on the host")

    assert (project / "a.py").read_text() == "content of a.py"
    assert filesystem.read("src/b.py").content == "content of src/b.py"


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*.py"], [], ["a.py", "src/b.py"]),
        ([], [".git", "node_modules", "link"], ["a.py", "src/b.py", "src/b.txt"]),
        (["src/*"], ["*.js"], ["src/b.py", "src/b.txt"]),
        (["*"], ["src"], [".git/config", "a.py"]),
        (["nothing"], [], []),
    ],
)
def test_patterns_choose_what_is_copied(
    project: Path, include: list[str], exclude: list[str], expected: list[str]
) -> None:
    (project / "link").unlink()

    filesystem = InMemoryFilesystem(mounts=[HostMount(project, include=include, exclude=exclude)])

    assert paths(filesystem) == expected


def test_only_directories_with_something_to_copy_are_made_for_a_pattern(project: Path) -> None:
    filesystem = InMemoryFilesystem(mounts=[HostMount(project, include=["*.py"])])

    assert [entry.name for entry in filesystem.list()] == ["a.py", "src"]


def test_too_much_to_copy_is_refused_and_nothing_copied(project: Path) -> None:
    with pytest.raises(ValueError, match="limit is 10"):
        InMemoryFilesystem(mounts=[HostMount(project, max_bytes=10)])


def test_the_limit_counts_only_what_is_copied(project: Path) -> None:
    assert paths(InMemoryFilesystem(mounts=[HostMount(project, include=["a.py"], max_bytes=15)])) == ["a.py"]


def test_a_single_file_is_copied_to_its_place(project: Path) -> None:
    filesystem = InMemoryFilesystem(mounts=[HostMount(project / "a.py", "in/other.py")])

    assert contents(filesystem) == {"in": None, "in/other.py": b"content of a.py"}


def test_several_mounts_lie_over_each_other(project: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "c.py").write_text("more")

    filesystem = InMemoryFilesystem(
        mounts=[HostMount(project, include=["a.py"]), HostMount(tmp_path / "more"), HostMount(tmp_path / "more", "d")]
    )

    assert paths(filesystem) == ["a.py", "c.py", "d/c.py"]


def test_a_host_path_that_is_missing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        InMemoryFilesystem(mounts=[HostMount(tmp_path / "missing")])


def test_a_read_only_filesystem_has_its_mounts(project: Path) -> None:
    filesystem = InMemoryFilesystem(mounts=[HostMount(project)], read_only=True)

    assert filesystem.read("a.py").content == "content of a.py"
    with pytest.raises(PermissionError):
        filesystem.write("a.py", "x")


def test_an_attribute_that_cannot_be_read_hides_no_later_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def getxattr(_path: bytes, name: str) -> bytes:
        if name == "security.hidden":
            raise OSError(errno.ENODATA, "No data available")
        return b"mine"

    (root / "file").write_text("content")
    monkeypatch.setattr(os, "listxattr", lambda _path: ["security.hidden", "user.note"])
    monkeypatch.setattr(os, "getxattr", getxattr)
    files = HostFiles(root)
    top = files.top()
    node = files.child(top, b"file")
    assert files.xattrs(node) == {b"user.note": b"mine"}
    files.release(node)
    files.release(top)
