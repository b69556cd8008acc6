"""`--protect` and `--hide`: every system call that could get around them, as root."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.linux import portable
from protocol.volume import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT
from tests.mount.conftest import BACKENDS, ENGINES, MountIt, mounted
from tests.support.lower_layers import make
from vfsd import Workspace

PROTECT = ("src/secret", "*.lock", "vendor/")
HIDE = (".env", "private/", "hidden/inside")
POLICY = {"protect": PROTECT, "hide": HIDE}
PLACES = [f"{engine}-{backend}" for engine in ENGINES for backend in BACKENDS]


def fill(root: Path) -> None:
    """The content of each mount: `alias` and `envalias` are further names of a protected and of a hidden file."""
    for name in ("src", "vendor/deep", "private", "hidden/other", "only", "empty"):
        (root / name).mkdir(parents=True)
    for name, text in {
        "src/secret": "secret", "src/free": "free", "top.lock": "lock", "vendor/lib": "lib", "vendor/deep/lib": "lib",
        ".env": "TOKEN", "src/.env": "TOKEN", "private/key": "key", "hidden/inside": "in", "hidden/seen": "seen",
        "only/.env": "TOKEN", "free": "free",
    }.items():  # fmt: skip
        (root / name).write_text(text)
    os.link(root / "src/secret", root / "alias")
    os.link(root / ".env", root / "envalias")


@contextmanager
def policed(on: str, place: Path, **options: Any) -> Iterator[tuple[Workspace, Path]]:
    """A mount with the policy over the content; yields the directory below, too, or the mountpoint."""
    engine, _, backend = on.partition("-")
    below = place / "below"
    below.mkdir()
    fill(below)
    options = {"engine": engine, "name": f"{place.parent.name}-{place.name}"[-60:], **POLICY, **options}
    if backend == "memory":
        with mounted(place / "plain", engine=engine, name=f"plain-{place.name}") as plain:
            fill(Path(plain.path))
            plain.export(place / "content.zip")
        options["archive"] = place / "content.zip"
    else:
        options["backend"] = f"{backend}:{below}"
    with mounted(place / "mount", **options) as workspace:
        yield workspace, below


@pytest.fixture(scope="module", params=PLACES)
def shared(request: pytest.FixtureRequest, session_dir: str) -> Iterator[tuple[Workspace, Path]]:
    place = Path(session_dir, "work", f"policy-{request.param}")
    place.mkdir()
    with policed(str(request.param), place) as found:
        yield found


@pytest.fixture
def root(shared: tuple[Workspace, Path]) -> Path:
    return Path(shared[0].path)


def error_of(act: Callable[[], object]) -> str | None:
    """The name of the errno with which `act` fails."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


def fails(code: int, act: Callable[[], object]) -> None:
    assert error_of(act) == errno.errorcode[code]


def content(path: Path) -> bytes:
    """The content that a program sees.  After a failed write-back the kernel fails the next close(2), by whomever."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def state(root: Path) -> dict[str, object]:
    """Everything that a program sees, contents and metadata included."""
    found: dict[str, object] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            try:
                seen = path.lstat()
            except FileNotFoundError:
                continue  # a further name of a hidden file
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(root))] = (
                content, seen.st_mode, seen.st_uid, seen.st_nlink, seen.st_mtime_ns, seen.st_size
            )  # fmt: skip
    return found


def attempts(root: Path, name: str) -> dict[str, Callable[[], object]]:
    """Every way to change the file `name`; each is to fail."""
    path, other = root / name, root / "free"

    def with_open(flags: int) -> Callable[[], object]:
        return lambda: os.close(os.open(path, flags))

    def through_readable() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)

    def by_descriptor(act: Callable[[int], object]) -> Callable[[], object]:
        def run() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                act(descriptor)
            finally:
                os.close(descriptor)

        return run

    return {
        "O_WRONLY": with_open(os.O_WRONLY),
        "O_RDWR": with_open(os.O_RDWR),
        "O_APPEND": with_open(os.O_WRONLY | os.O_APPEND),
        "O_TRUNC": with_open(os.O_WRONLY | os.O_TRUNC),
        "O_RDONLY | O_TRUNC": with_open(os.O_RDONLY | os.O_TRUNC),
        "O_CREAT": with_open(os.O_WRONLY | os.O_CREAT),
        "O_DIRECT": with_open(os.O_RDWR | os.O_DIRECT),
        "/proc/self/fd": through_readable,
        "truncate": lambda: os.truncate(path, 0),
        "truncate to the same size": lambda: os.truncate(path, path.stat().st_size),
        "chmod": lambda: path.chmod(0o777),
        "fchmod": by_descriptor(lambda descriptor: os.fchmod(descriptor, 0o777)),
        "chown": lambda: os.chown(path, 1, 1),
        "lchown": lambda: os.lchown(path, 1, 1),
        "utime": lambda: os.utime(path, (1, 1)),
        "futime": by_descriptor(lambda descriptor: os.utime(descriptor, (1, 1))),
        "setxattr": lambda: os.setxattr(path, "user.note", b"1"),
        "fsetxattr": by_descriptor(lambda descriptor: os.setxattr(descriptor, "user.note", b"1")),
        "removexattr": lambda: os.removexattr(path, "user.there"),
        "unlink": path.unlink,
        "rename": lambda: path.rename(root / "moved"),
        "rename over it": lambda: _new(root / "new").rename(path),
        "rename to a file with another type": lambda: renameat2(str(path), str(root / "empty"), RENAME_EXCHANGE),
        "RENAME_NOREPLACE": lambda: renameat2(str(path), str(root / "moved"), RENAME_NOREPLACE),
        "RENAME_EXCHANGE": lambda: renameat2(str(other), str(path), RENAME_EXCHANGE),
        "RENAME_WHITEOUT": lambda: renameat2(str(path), str(root / "moved"), RENAME_WHITEOUT),
        "link": lambda: os.link(path, root / "linked"),
        "link of a descriptor": by_descriptor(lambda descriptor: _link_descriptor(descriptor, root / "linked")),
    }


def renameat2(source: str, target: str, flags: int) -> None:
    here = os.open("/", os.O_PATH)
    try:
        portable.renameat2(here, os.fsencode(source[1:]), here, os.fsencode(target[1:]), flags)
    finally:
        os.close(here)


def _new(path: Path) -> Path:
    path.write_text("new")
    return path


def _link_descriptor(descriptor: int, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    at_fdcwd, at_empty_path = -100, 0x1000  # linux/fcntl.h
    if libc.linkat(descriptor, b"", at_fdcwd, os.fsencode(target), at_empty_path):
        raise OSError(ctypes.get_errno(), "linkat")


PROTECTED = ("src/secret", "alias", "top.lock", "vendor/lib", "vendor/deep/lib")


@pytest.mark.parametrize("name", PROTECTED)
def test_no_system_call_changes_a_protected_file(root: Path, name: str) -> None:
    before = state(root)
    for what, attempt in attempts(root, name).items():
        # Some file systems below know no whiteouts.
        expected = {"EPERM", "EINVAL"} if what == "RENAME_WHITEOUT" else {"EPERM"}
        assert error_of(attempt) in expected, what
        (root / "new").unlink(missing_ok=True)
        assert state(root) == before, what


def test_a_protected_file_can_be_read_executed_and_mapped(root: Path) -> None:
    assert (root / "src/secret").read_text() == "secret"
    with (root / "src/secret").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as private:
        private[:3] = b"own"  # a private mapping is the program's own memory
    with (root / "src/secret").open("rb") as file:
        fails(errno.EACCES, lambda: mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    assert (root / "alias").read_text() == "secret"


def test_no_directory_with_something_protected_in_it_is_moved_replaced_or_removed(root: Path) -> None:
    before = state(root)
    for name in ("src", "vendor", "vendor/deep"):
        path = root / name
        fails(errno.EPERM, lambda path=path: path.rename(root / "moved"))
        fails(errno.EPERM, lambda path=path: renameat2(str(path), str(root / "empty"), RENAME_EXCHANGE))
        fails(errno.EPERM, lambda path=path: renameat2(str(root / "empty"), str(path), RENAME_EXCHANGE))
        assert error_of(path.rmdir) in {"EPERM", "ENOTEMPTY"}
        assert error_of(lambda path=path: (root / "empty").rename(path)) in {"EPERM", "ENOTEMPTY"}  # type: ignore[misc]
    fails(errno.EPERM, lambda: shutil.rmtree(root / "vendor"))
    assert state(root) == before


def test_nothing_is_made_in_a_protected_directory_or_at_a_protected_path(root: Path) -> None:
    before = state(root)
    for name in ("vendor/new", "new.lock", "src/new.lock"):
        path = root / name
        for creation in (
            lambda path=path: path.write_text("new"),
            path.mkdir,
            lambda path=path: path.symlink_to("free"),
            lambda path=path: os.link(root / "free", path),
            lambda path=path: os.mkfifo(path),
            lambda path=path: _new(root / "new").rename(path),
        ):
            fails(errno.EPERM, creation)
            (root / "new").unlink(missing_ok=True)
    fails(errno.EPERM, lambda: (root / "vendor").chmod(0o700))
    assert state(root) == before


def test_no_symlink_stands_in_for_a_directory_that_a_pattern_names(root: Path) -> None:
    (root / "elsewhere").mkdir(exist_ok=True)
    (root / "pointer").symlink_to("elsewhere")
    fails(errno.EEXIST, lambda: (root / "src").symlink_to("elsewhere"))
    fails(errno.EPERM, lambda: (root / "elsewhere" / "vendor").symlink_to("../elsewhere"))
    fails(errno.EPERM, lambda: (root / "pointer").rename(root / "elsewhere" / "vendor"))
    (root / "pointer").unlink()
    (root / "elsewhere").rmdir()


def test_what_is_hidden_is_absent_for_every_system_call(root: Path) -> None:
    listed = {name for _, directories, files in os.walk(root) for name in (*directories, *files)}
    assert not listed & {".env", "private", "key", "inside"}
    for name in (".env", "envalias", "src/.env", "private", "private/key", "hidden/inside"):
        path = root / name
        for look in (
            path.lstat, path.read_bytes, lambda path=path: os.listxattr(path), lambda path=path: os.readlink(path),
            lambda path=path: os.truncate(path, 0), lambda path=path: path.chmod(0o777), path.unlink,
            lambda path=path: path.rename(root / "shown"), lambda path=path: os.link(path, root / "shown"),
            lambda path=path: os.close(os.open(path, os.O_PATH)),
        ):  # fmt: skip
            fails(errno.ENOENT, look)
    listing = subprocess.run(["find", ".", "-name", "*env"], cwd=root, capture_output=True, text=True, check=False)
    assert ".env" not in listing.stdout.split("/")


def test_a_hidden_name_is_not_made_whether_it_exists_or_not(root: Path) -> None:
    for name in (".env", "empty/.env", "only/.env"):
        path = root / name
        for creation in (
            lambda path=path: path.write_text("new"),
            lambda path=path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
            path.mkdir,
            lambda path=path: path.symlink_to("free"),
            lambda path=path: os.link(root / "free", path),
            lambda path=path: os.mkfifo(path),
            lambda path=path: _new(root / "new").rename(path),
            lambda path=path: renameat2(str(_new(root / "new")), str(path), RENAME_NOREPLACE),
        ):
            fails(errno.EPERM, creation)
            (root / "new").unlink(missing_ok=True)
    assert error_of(lambda: renameat2(str(root / "free"), str(root / ".env"), RENAME_EXCHANGE)) in {"EPERM", "ENOENT"}
    assert (root / "free").read_text() == "free"


def test_a_directory_with_hidden_entries_is_empty_and_not_removed(root: Path) -> None:
    assert list((root / "only").iterdir()) == []
    fails(errno.ENOTEMPTY, (root / "only").rmdir)


def test_a_directory_is_not_moved_to_where_something_hidden_becomes_visible(root: Path) -> None:
    fails(errno.EPERM, lambda: (root / "hidden").rename(root / "moved"))
    (root / "only").rename(root / "moved")  # .env is hidden there as well
    assert list((root / "moved").iterdir()) == []
    (root / "moved").rename(root / "only")


def test_everything_else_is_as_without_a_policy(root: Path) -> None:
    directory = root / "work"
    directory.mkdir()
    (directory / "a").write_text("a")
    os.link(directory / "a", directory / "b")
    with (directory / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[:1] = b"A"
        shared.flush()
    assert (directory / "b").read_text() == "A"
    (directory / "b").unlink()
    (directory / "a").rename(directory / "c")
    directory.rename(root / "renamed")
    renameat2(str(root / "renamed"), str(root / "empty"), RENAME_EXCHANGE)
    renameat2(str(root / "renamed"), str(root / "empty"), RENAME_EXCHANGE)
    os.setxattr(root / "renamed", "user.note", b"1")
    descriptor = os.open(root / "renamed" / "c", os.O_RDWR | os.O_TRUNC)
    os.posix_fallocate(descriptor, 0, 100)
    os.close(descriptor)
    shutil.rmtree(root / "renamed")


def test_the_tools_of_agents_respect_it(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    files = workspace.filesystem
    with pytest.raises(PermissionError):
        files.write("src/secret", "new")
    with pytest.raises(PermissionError):
        files.write(".env", "new")
    for name in ("vendor/lib", "vendor/new"):
        with pytest.raises(PermissionError, match=name):  # not the name of an unfinished file
            files.write(name, "new")
    with pytest.raises(PermissionError):
        files.delete("top.lock")
    with pytest.raises(FileNotFoundError):
        files.read(".env")
    with pytest.raises(FileNotFoundError):
        files.read("envalias")
    found = subprocess.run(
        [sys.executable, "-m", "vfsd.cli.main", "fs", "grep", "TOKEN", "-w", workspace.name],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ".env" not in found.stdout


def test_snapshots_show_nothing_hidden(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    workspace.snapshot("kept")
    state = Path(workspace.path, ".snapshots", "kept")
    assert (state / "src" / "secret").read_text() == "secret"
    assert not {".env", "private", "envalias"} & set(os.listdir(state))
    fails(errno.ENOENT, (state / ".env").read_bytes)
    fails(errno.ENOENT, (state / "envalias").read_bytes)
    fails(errno.ENOENT, (state / "private" / "key").read_bytes)
    workspace.drop("kept")


def test_denied_attempts_are_in_the_log(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    for act in ((root / "src/secret").unlink, (root / ".env").mkdir, lambda: (root / "alias").write_text("")):
        fails(errno.EPERM, act)
    denied = [change for change in workspace.log() if change.change == "denied"]
    assert [change.attempt for change in denied[-3:]] == ["unlink", "mkdir", "open"]
    assert [change.path for change in denied[-3:-1]] == ["src/secret", ".env"]
    assert denied[-1].path in {"alias", "src/secret"}  # one of its names
    assert all(change.process is not None and change.process.pid == os.getpid() for change in denied[-3:])


# -- what the daemon itself changes and sends -----------------------------------------------------------
def test_an_export_and_a_diff_leave_out_what_is_hidden(shared: tuple[Workspace, Path], tmp_path: Path) -> None:
    workspace, _ = shared
    assert workspace.export(tmp_path / "out.zip").hidden == 6
    listed = subprocess.run(["unzip", "-l", tmp_path / "out.zip"], capture_output=True, text=True, check=True).stdout
    assert "src/secret" in listed
    assert not any(name in listed for name in (".env", "envalias", "private/", "hidden/inside"))


def test_a_change_by_the_daemon_respects_it_and_changes_nothing(shared: tuple[Workspace, Path], tmp_path: Path) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    for name in ("src/secret", ".env", "new.lock"):
        content = tmp_path / name.replace("/", "-")
        (content / name).parent.mkdir(parents=True)
        (content / name).write_text("from the archive")
        (content / "imported").write_text("from the archive")
        make("archive", content, tmp_path / f"a-{content.name}.zip")
        before, snapshots = state(root), [each.name for each in workspace.snapshots()]
        with pytest.raises(PermissionError, match="policy"):
            workspace.import_archive(tmp_path / f"a-{content.name}.zip")
        assert state(root) == before
        assert [each.name for each in workspace.snapshots()] == snapshots
    assert any(each.change == "denied" and each.attempt == "import" for each in workspace.log())


def copied(name: str, root: Path, content: Path) -> Path:
    """A copy of one file with its times, below `content`."""
    copy = content / name
    copy.parent.mkdir(parents=True)
    shutil.copy2(root / name, copy)
    return copy


def test_an_archive_brings_no_other_content_of_the_same_size_and_time(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    secret = copied("src/secret", Path(workspace.path), content)
    was = secret.stat()
    secret.write_text("FORGED")
    os.utime(secret, ns=(was.st_atime_ns, was.st_mtime_ns))
    make("archive", content, tmp_path / "forged.zip")
    with pytest.raises(PermissionError, match="policy"):
        workspace.import_archive(tmp_path / "forged.zip")
    assert Path(workspace.path, "src/secret").read_text() == "secret"


def test_an_archive_brings_no_symlink_in_place_of_a_directory_that_a_pattern_names(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    content.mkdir()
    (content / "private").symlink_to("free")
    make("archive", content, tmp_path / "symlink.zip")
    with pytest.raises(PermissionError, match="policy"):
        workspace.import_archive(tmp_path / "symlink.zip")


def test_a_name_that_an_archive_gives_to_a_protected_file_is_protected(
    shared: tuple[Workspace, Path], tmp_path: Path
) -> None:
    workspace, content = shared[0], tmp_path / "content"
    root = Path(workspace.path)
    fails(errno.EPERM, lambda: (root / "alias").write_text("x"))  # the daemon knows all names now
    library = copied("vendor/lib", root, content)
    (content / "further").mkdir()
    os.link(library, content / "further/lib")
    make("archive", content, tmp_path / "linked.zip")
    workspace.import_archive(tmp_path / "linked.zip")
    assert (root / "further/lib").stat().st_nlink == 2
    fails(errno.EPERM, lambda: (root / "further/lib").write_text("x"))
    assert (root / "vendor/lib").read_text() == "lib"
    workspace.undo()


def test_a_restore_goes_back_where_nothing_protected_changed(shared: tuple[Workspace, Path]) -> None:
    workspace, _ = shared
    root = Path(workspace.path)
    workspace.snapshot("before")
    (root / "extra").write_text("1")
    workspace.restore("before")
    assert not (root / "extra").exists()
    assert (root / "src/secret").read_text() == "secret"
    workspace.undo()
    assert (root / "extra").read_text() == "1"
    (root / "extra").unlink()
    workspace.drop("before")


# -- tightening -----------------------------------------------------------------------------------------
@pytest.fixture(params=ENGINES)
def tightened(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Callable[..., tuple[Workspace, Path]]]:
    place = workdir / "t"
    place.mkdir()
    with policed(f"{request.param}-memory", place, protect=("nothing",), hide=()) as (workspace, _):
        yield lambda **more: (workspace, Path(workspace.path))


def test_tightening_holds_for_files_that_are_open_and_mapped(
    tightened: Callable[..., tuple[Workspace, Path]],
) -> None:
    workspace, root = tightened()
    descriptor = os.open(root / "src/secret", os.O_RDWR)
    with mmap.mmap(descriptor, 6) as shared:
        shared[:2] = b"SE"
        assert workspace.policy(protect=["src/secret"]).open_files == ("src/secret",)
        assert (root / "src/secret").read_bytes() == b"SEcret"  # written while that was allowed
        fails(errno.EPERM, lambda: os.pwrite(descriptor, b"x", 0))
        fails(errno.EPERM, lambda: os.ftruncate(descriptor, 0))
        fails(errno.EPERM, lambda: os.posix_fallocate(descriptor, 0, 100))
        with (root / "free").open("rb") as free:
            fails(errno.EPERM, lambda: os.copy_file_range(free.fileno(), descriptor, 4))
        shared[:2] = b"XX"
        deadline = time.monotonic() + 30
        while content(root / "src/secret") != b"SEcret":
            assert time.monotonic() < deadline, "a page of a refused write stays"
            time.sleep(0.05)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    assert content(root / "src/secret") == content(root / "alias") == b"SEcret"
    assert workspace.policy().open_files == ()


def test_tightening_hides_what_the_kernel_has_cached(tightened: Callable[..., tuple[Workspace, Path]]) -> None:
    workspace, root = tightened()
    descriptor = os.open(root / ".env", os.O_RDONLY)
    inside = os.open(root / "private", os.O_PATH)
    assert (root / "envalias").read_text() == (root / "src/.env").read_text() == "TOKEN"
    os.stat("key", dir_fd=inside)
    workspace.snapshot("early")
    assert (root / ".snapshots/early/.env").read_text() == "TOKEN"
    workspace.policy(hide=[".env", "private/"])
    for name in (".env", "envalias", "src/.env", "private/key", ".snapshots/early/.env"):
        fails(errno.ENOENT, (root / name).lstat)
    fails(errno.ESTALE, lambda: os.pread(descriptor, 5, 0))
    assert error_of(lambda: os.stat("key", dir_fd=inside)) in {"ENOENT", "ESTALE"}
    os.close(descriptor)
    os.close(inside)
    assert workspace.policy().hide == (".env", "private/")


def test_a_restore_to_before_the_tightening_is_refused(tightened: Callable[..., tuple[Workspace, Path]]) -> None:
    workspace, root = tightened()
    workspace.snapshot("early")
    (root / "src/secret").write_text("later")
    (root / "free").write_text("later")
    workspace.policy(protect=["src/secret"])
    before, snapshots = state(root), workspace.snapshots()
    for dry_run in (True, False):
        with pytest.raises(PermissionError, match="src/secret"):
            workspace.restore("early", dry_run=dry_run)
        assert state(root) == before
        assert workspace.snapshots() == snapshots
    assert [change.path for change in workspace.restore("early", ["free"], dry_run=True).changes] == ["free"]
    workspace.restore("early", ["free"])
    assert (root / "free").read_text() == "free"
    assert (root / "src/secret").read_text() == "later"


def test_a_policy_is_never_loosened(tightened: Callable[..., tuple[Workspace, Path]]) -> None:
    workspace, root = tightened()
    workspace.policy(protect=["src/secret"])
    workspace.policy(protect=["src/secret"])
    assert workspace.policy().protect == ("nothing", "src/secret")
    with pytest.raises(PermissionError):
        (root / "src/secret").unlink()


def test_a_negated_pattern_that_is_added_takes_nothing_back(tightened: Callable[..., tuple[Workspace, Path]]) -> None:
    workspace, root = tightened()
    workspace.policy(protect=["*.lock"])
    fails(errno.EINVAL, lambda: workspace.policy(protect=["!top.lock"]))
    fails(errno.EPERM, (root / "top.lock").unlink)


def test_a_mount_without_a_policy_cannot_be_tightened(mount: MountIt) -> None:
    workspace = mount()
    assert workspace.policy() == type(workspace.policy())()
    fails(errno.EOPNOTSUPP, lambda: workspace.policy(protect=["x"]))


def test_a_fork_has_the_policy_of_its_source(workdir: Path) -> None:
    place = workdir / "f"
    place.mkdir()
    with policed("native-memory", place) as (workspace, _):
        workspace.policy(protect=["free"])
        with workspace.fork(workdir / "fork") as fork:
            root = Path(fork.path)
            fails(errno.ENOENT, (root / ".env").lstat)
            fails(errno.EPERM, lambda: (root / "src/secret").write_text("x"))
            fails(errno.EPERM, lambda: (root / "free").write_text("x"))
            assert fork.policy() == workspace.policy()
            (root / "src/new").write_text("of the fork")
            workspace.policy(protect=["src/new"])
            for dry_run in (True, False):
                with pytest.raises(PermissionError, match="src/new"):
                    workspace.merge(fork, dry_run=dry_run)


def test_a_backend_that_waits_for_its_answers_is_held_as_well(workdir: Path) -> None:
    below = workdir / "below"
    below.mkdir()
    fill(below)
    options: dict[str, Any] = {"workdir": str(below), "store": workdir / "store", **POLICY}
    with mounted(workdir / "x", backend=f"exec:{sys.executable}", name=f"{workdir.name}-x", **options) as workspace:
        root = Path(workspace.path)
        for name in ("src/secret", "alias", "top.lock", "vendor/lib"):
            fails(errno.EPERM, lambda name=name: (root / name).write_text("x"))  # type: ignore[misc]
            fails(errno.EPERM, (root / name).unlink)
            fails(errno.EPERM, lambda name=name: (root / "free").rename(root / name))  # type: ignore[misc]
        for name in (".env", "envalias", "private/key"):
            fails(errno.ENOENT, (root / name).read_text)
        fails(errno.EPERM, (root / ".env").mkdir)
        fails(errno.EPERM, lambda: (root / "src").rename(root / "moved"))
        (root / "empty").rename(root / "moved")
        workspace.snapshot("kept")
        workspace.policy(protect=["free"])
        (below / "free").write_text("outside")
        with pytest.raises(PermissionError, match="policy"):
            workspace.restore("kept")
        assert (below / "free").read_text() == "outside"
        assert [each.name for each in workspace.snapshots()] == ["kept"]


def test_an_upgraded_daemon_has_the_policy_with_what_was_added(workdir: Path) -> None:
    with Workspace.mount(workdir / "u", name=f"{workdir.name}-u", protect=["nothing"]) as workspace:
        root = Path(workspace.path)
        (root / "kept").write_text("kept")
        (root / "gone").write_text("gone")
        workspace.policy(protect=["kept"], hide=["gone"])
        subprocess.run([sys.executable, "-m", "vfsd.cli.main", "upgrade", workspace.name], check=True)
        assert workspace.policy().hide == ("gone",)
        fails(errno.EPERM, lambda: (root / "kept").write_text("x"))
        fails(errno.ENOENT, (root / "gone").lstat)


def test_too_many_patterns_are_refused(mount: MountIt) -> None:
    with pytest.raises(ValueError, match="1,001 patterns"):
        mount(hide=[f"name-{number}" for number in range(1001)])
    workspace = mount(hide=[f"name-{number}" for number in range(1000)])
    fails(errno.EINVAL, lambda: workspace.policy(hide=["one-more"]))
    fails(errno.EPERM, lambda: Path(workspace.path, "name-999").touch())


def test_what_an_overlay_excludes_is_hidden_under_every_name(workdir: Path) -> None:
    place = workdir / "o"
    place.mkdir()
    with policed("native-overlay", place, hide=(), protect=(), exclude=(".env",)) as (workspace, below):
        root = Path(workspace.path)
        fails(errno.ENOENT, (root / ".env").lstat)
        fails(errno.EPERM, lambda: (root / ".env").write_text("x"))
        assert workspace.policy().hide == (".env",)
        assert (below / ".env").read_text() == "TOKEN"


def test_an_apply_does_not_write_what_is_protected_below(workdir: Path) -> None:
    place = workdir / "a"
    place.mkdir()
    with policed("native-overlay", place) as (workspace, below):
        root = Path(workspace.path)
        (root / "free").write_text("changed")
        (root / "src/free").write_text("changed")
        workspace.policy(protect=["src/free"])
        with pytest.raises(PermissionError, match="src/free"):
            workspace.apply()
        assert (below / "free").read_text() == (below / "src/free").read_text() == "free"
        workspace.apply(["free"])
        assert (below / "free").read_text() == "changed"


def test_with_a_write_back_cache_no_refused_page_stays(workdir: Path) -> None:
    place = workdir / "w"
    place.mkdir()
    options = {"protect": ("nothing",), "hide": (), "cache": "writeback"}
    with policed("native-memory", place, **options) as (workspace, _):
        root = Path(workspace.path)
        descriptor = os.open(root / "src/secret", os.O_RDWR)
        os.write(descriptor, b"SE")
        workspace.policy(protect=["src/secret"])
        assert (root / "src/secret").read_bytes() == b"SEcret"
        with contextlib.suppress(PermissionError):  # at the write, if the page was dropped already
            os.pwrite(descriptor, b"XX", 0)
            os.fsync(descriptor)
        with contextlib.suppress(PermissionError):
            os.close(descriptor)
        deadline = time.monotonic() + 30
        while content(root / "src/secret") != b"SEcret":
            assert time.monotonic() < deadline, "a page of a refused write stays"
            time.sleep(0.05)
        fails(errno.EPERM, lambda: (root / "src/secret").write_bytes(b"x"))
        (root / "free").write_text("still works")


def test_the_policy_survives_the_daemon(workdir: Path) -> None:
    options: dict[str, Any] = {"persist": True, "journal_dir": workdir / "journal", "name": f"{workdir.name}-k"}
    with Workspace.mount(workdir / "k", protect=["*.lock"], hide=["private/"], **options) as workspace:
        root = Path(workspace.path)
        (root / "work/src").mkdir(parents=True)
        for name in ("work/free", "work/src/free", "work/src/secret"):
            (root / name).write_text(name.rpartition("/")[2])
        os.link(root / "work/src/secret", root / "work/alias")
        workspace.policy(protect=["free", "secret"], hide=["work/src/free"])
        expected = workspace.policy()
        os.kill(workspace.pid, signal.SIGKILL)
        assert (root / "work/src/secret").read_text() == "secret"  # the next daemon answers
        for name in ("work/free", "work/alias", "work/src/secret"):
            fails(errno.EPERM, (root / name).unlink)
        fails(errno.ENOENT, (root / "work/src/free").lstat)
        fails(errno.ENOENT, (root / "work/private").lstat)
        fails(errno.EPERM, (root / "work/private").mkdir)
        assert workspace.policy() == expected
    # The next mount has the policy that its own options give, and says what it lacks.
    again = subprocess.run(
        [sys.executable, "-m", "vfsd.cli.main", "mount", workdir / "k", "--name", options["name"], "--persist",
         "--journal-dir", options["journal_dir"], "--hide", "private/"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--protect *.lock --protect free --protect secret --hide work/src/free" in again.stderr
    with mounted_already(options["name"]) as workspace:
        assert (Path(workspace.path) / "work/free").read_text() == "free"
        assert workspace.policy().hide == ("private/",)


@contextmanager
def mounted_already(name: str) -> Iterator[Workspace]:
    workspace = Workspace.attach(name)
    try:
        yield workspace
    finally:
        workspace.unmount(lazy=True)
