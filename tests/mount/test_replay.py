"""The events that inotify watchers of a real mount get for a restore, and that they see only the restored state."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.mount.engine_child import Served, Watcher, served
from tests.support.rights import needs_root

pytestmark = pytest.mark.workspaces(engines=["pyfuse3", "native"])


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    yield watcher
    os.close(watcher.fd)


@pytest.fixture
def mount(tmp_path, engine) -> Iterator[Served]:
    with served(str(tmp_path), engine=engine) as child:
        yield child


def write(path: str, text: str = "text") -> None:
    with open(path, "w") as file:
        file.write(text)


def restored(child: Served, watcher: Watcher) -> list[str]:
    return restored_to(child, watcher, "s")


def restored_to(child: Served, watcher: Watcher, name: str) -> list[str]:
    watcher.events()
    child.call("restore", name=name, replay=True)
    return watcher.events()


def test_a_file_that_a_restore_removes_is_deleted_for_watchers(mount, watcher):
    watcher.add(mount.path, "")
    mount.call("snapshot", name="s")
    write(mount.path + "/new")
    assert restored(mount, watcher) == ["DELETE /new"]
    assert os.listdir(mount.path) == []


def test_a_file_that_a_restore_brings_back_is_created_for_watchers(mount, watcher):
    write(mount.path + "/gone", "kept")
    before = os.stat(mount.path + "/gone")
    mount.call("snapshot", name="s")
    os.unlink(mount.path + "/gone")
    watcher.add(mount.path, "")
    assert restored(mount, watcher) == ["CREATE /gone", "CLOSE_WRITE /gone"]
    after = os.stat(mount.path + "/gone")
    assert (after.st_ino, after.st_mtime_ns, after.st_nlink) == (before.st_ino, before.st_mtime_ns, 1)
    with open(mount.path + "/gone") as file:
        assert file.read() == "kept"


def test_directories_come_and_go_as_directories(mount, watcher):
    os.makedirs(mount.path + "/back/inner")
    mount.call("snapshot", name="s")
    os.removedirs(mount.path + "/back/inner")
    os.makedirs(mount.path + "/new/inner")
    write(mount.path + "/new/inner/file")
    watcher.add(mount.path, "")
    assert restored(mount, watcher) == ["DELETE|DIR /new", "CREATE|DIR /back"]
    assert os.listdir(mount.path) == ["back"]
    os.rmdir(mount.path + "/back/inner")
    os.mkdir(mount.path + "/back/again")


def test_a_directory_that_was_removed_and_brought_back_twice_still_works(mount, watcher):
    os.mkdir(mount.path + "/d")
    inside = os.open(mount.path + "/d", os.O_DIRECTORY)
    mount.call("snapshot", name="with")
    os.rmdir(mount.path + "/d")
    mount.call("snapshot", name="without")
    for _ in range(2):
        mount.call("restore", name="with", replay=True)
        write(mount.path + "/d/file")
        assert os.listdir(mount.path + "/d") == ["file"]
        mount.call("restore", name="without", replay=True)
        assert os.listdir(mount.path) == []
    os.close(inside)


def test_changed_content_is_a_modification(mount, watcher):
    write(mount.path + "/file", "first")
    mtime = os.stat(mount.path + "/file").st_mtime_ns
    mount.call("snapshot", name="s")
    write(mount.path + "/file", "second")
    watcher.add(mount.path, "")
    watcher.add(mount.path + "/file", "itself")
    events = restored(mount, watcher)
    assert {"MODIFY /file", "MODIFY itself", "CLOSE_WRITE /file"} <= set(events)
    assert not [event for event in events if "CREATE" in event or "DELETE" in event]
    assert os.stat(mount.path + "/file").st_mtime_ns == mtime
    with open(mount.path + "/file") as file:
        assert file.read() == "first"


def test_a_program_gets_its_modification_but_no_close_so_that_it_can_be_started_meanwhile(mount, watcher):
    write(mount.path + "/run", "first")
    os.chmod(mount.path + "/run", 0o755)
    mount.call("snapshot", name="s")
    write(mount.path + "/run", "second")
    watcher.add(mount.path, "")
    assert restored(mount, watcher) == ["MODIFY /run"]


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "fifo", "root"])
@needs_root
def test_changed_attributes_are_an_attribute_event(mount, watcher, kind):
    path = mount.path + ("" if kind == "root" else "/it")
    make: dict[str, Callable[[str], object]] = {
        "file": write,
        "directory": os.mkdir,
        "symlink": lambda path: os.symlink("target", path),
        "fifo": os.mkfifo,
        "root": lambda path: None,
    }
    make[kind](path)
    mount.call("snapshot", name="s")
    os.chown(path, 5, 5, follow_symlinks=False)
    watcher.add(mount.path, "")
    events = restored(mount, watcher)
    expected = {"root": "ATTRIB|DIR ", "directory": "ATTRIB|DIR /it"}.get(kind, "ATTRIB /it")
    assert events == [expected]
    assert os.lstat(path).st_uid == 0


def test_a_replaced_name_is_deleted_and_created(mount, watcher):
    write(mount.path + "/both", "first")
    mount.call("snapshot", name="s")
    write(mount.path + "/other", "second")
    os.rename(mount.path + "/other", mount.path + "/both")
    watcher.add(mount.path, "")
    assert restored(mount, watcher) == ["DELETE /both", "CREATE /both", "CLOSE_WRITE /both"]
    assert os.stat(mount.path + "/both").st_nlink == 1
    with open(mount.path + "/both") as file:
        assert file.read() == "first"


def test_a_name_that_changes_its_type_is_deleted_as_the_one_and_created_as_the_other(mount, watcher):
    write(mount.path + "/a")
    os.mkdir(mount.path + "/b")
    mount.call("snapshot", name="s")
    os.unlink(mount.path + "/a")
    os.rmdir(mount.path + "/b")
    os.mkdir(mount.path + "/a")
    os.symlink("x", mount.path + "/b")
    watcher.add(mount.path, "")
    mount.call("restore", name="s")
    # What other processes have in the cache before the replay must not hide the old names from it.
    assert stat.S_ISREG(os.stat(mount.path + "/a").st_mode)
    assert stat.S_ISDIR(os.stat(mount.path + "/b").st_mode)
    watcher.events()
    mount.call("replay_again")
    events = watcher.events()
    assert sorted(events) == sorted(["DELETE|DIR /a", "CREATE /a", "CLOSE_WRITE /a", "DELETE /b", "CREATE|DIR /b"])


def test_names_that_others_have_looked_up_since_the_restore_are_replayed_all_the_same(mount, watcher):
    write(mount.path + "/back")
    mount.call("snapshot", name="s")
    os.unlink(mount.path + "/back")
    write(mount.path + "/new")
    watcher.add(mount.path, "")
    mount.call("restore", name="s")
    assert os.path.exists(mount.path + "/back")
    assert not os.path.exists(mount.path + "/new")
    watcher.events()
    mount.call("replay_again")
    assert watcher.events() == ["DELETE /new", "CREATE /back", "CLOSE_WRITE /back"]


def test_a_name_that_somebody_has_changed_since_the_restore_is_left_alone(mount, watcher):
    write(mount.path + "/back")
    mount.call("snapshot", name="s")
    os.unlink(mount.path + "/back")
    write(mount.path + "/new")
    mount.call("restore", name="s")
    os.unlink(mount.path + "/back")
    write(mount.path + "/new", "of somebody")
    watcher.add(mount.path, "")
    watcher.events()
    mount.call("replay_again")
    assert watcher.events() == []
    assert os.listdir(mount.path) == ["new"]
    with open(mount.path + "/new") as file:
        assert file.read() == "of somebody"


@needs_root
def test_special_files_and_hard_links_come_back(mount, watcher):
    os.mkfifo(mount.path + "/fifo")
    os.mknod(mount.path + "/null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.symlink("anywhere", mount.path + "/link")
    write(mount.path + "/one")
    os.link(mount.path + "/one", mount.path + "/two")
    mount.call("snapshot", name="s")
    for name in os.listdir(mount.path):
        if name != "one":
            os.unlink(f"{mount.path}/{name}")
    watcher.add(mount.path, "")
    events = restored(mount, watcher)
    created = {event for event in events if event.startswith("CREATE")}
    assert created == {"CREATE /fifo", "CREATE /null", "CREATE /link", "CREATE /two"}
    assert os.readlink(mount.path + "/link") == "anywhere"
    assert os.stat(mount.path + "/null").st_rdev == os.makedev(1, 3)
    assert os.stat(mount.path + "/one").st_nlink == 2


def test_watchers_of_subdirectories_are_told_in_theirs(mount, watcher):
    os.makedirs(mount.path + "/a/b")
    mount.call("snapshot", name="s")
    write(mount.path + "/a/b/new")
    watcher.add(mount.path, "")
    watcher.add(mount.path + "/a/b", "b")
    assert restored(mount, watcher) == ["DELETE b/new"]


def test_without_a_replay_the_kernel_raises_nothing(mount, watcher):
    write(mount.path + "/file", "first")
    write(mount.path + "/gone")
    mount.call("snapshot", name="s")
    write(mount.path + "/file", "second")
    os.unlink(mount.path + "/gone")
    write(mount.path + "/new")
    watcher.add(mount.path, "")
    mount.call("restore", name="s")
    assert watcher.events() == []


def test_a_replay_that_is_given_up_changes_nothing_and_the_next_one_goes_on(mount, watcher):
    for number in range(300):
        write(f"{mount.path}/{number}", "first")
    mount.call("snapshot", name="s")
    for number in range(300):
        write(mount.path + "/new", "second")
        os.rename(mount.path + "/new", f"{mount.path}/{number}")
    mount.call("restore", name="s")
    watcher.add(mount.path, "")
    for _ in range(20):
        mount.call("replay_again", give_up_s=0.005)
        for number in (0, 150, 299):
            with open(f"{mount.path}/{number}") as file:
                assert file.read() == "first"
    watcher.events()
    mount.call("replay_again")
    assert len([event for event in watcher.events() if event.startswith("CREATE")]) == 300
    assert len(os.listdir(mount.path)) == 300


def test_replays_that_are_dropped_raise_no_events_and_later_ones_do(mount, watcher):
    for number in range(300):
        write(f"{mount.path}/{number}")
    mount.call("snapshot", name="s")
    for number in range(300):
        os.unlink(f"{mount.path}/{number}")
    mount.call("restore", name="s")
    watcher.add(mount.path, "")
    for _ in range(10):
        mount.call("start_replay")
    mount.call("drop_replays")
    mount.call("replay_again")  # after the others
    created = len([event for event in watcher.events() if event.startswith("CREATE")])
    # All of the last one, and some of the one that ran.
    assert 300 <= created < 10 * 300
    assert len(os.listdir(mount.path)) == 300


@contextmanager
def hammering(check: Callable[[], None], threads: int = 2) -> Iterator[None]:
    """Runs `check` all the time, on other threads; its first failure is raised at the end."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                check()
        except BaseException as error:
            failures.append(error)

    runners = [threading.Thread(target=run) for _ in range(threads)]
    for runner in runners:
        runner.start()
    try:
        yield
    finally:
        stop.set()
        for runner in runners:
            runner.join()
    if failures:
        raise failures[0]


@pytest.mark.extended
def test_nobody_sees_anything_but_the_restored_state_while_the_changes_are_replayed(mount, watcher):
    root = mount.path
    write(root + "/back", "back")
    os.makedirs(root + "/dir/inner")
    write(root + "/both", "first")
    write(root + "/file", "first")
    mount.call("snapshot", name="s")
    os.unlink(root + "/back")
    os.removedirs(root + "/dir/inner")
    write(root + "/other", "second")
    os.rename(root + "/other", root + "/both")
    write(root + "/file", "second")
    write(root + "/new")
    os.makedirs(root + "/newdir/inner")
    watcher.add(root, "")
    mount.call("restore", name="s")
    names = ["back", "both", "dir", "file"]
    kept = {name: os.stat(f"{root}/{name}") for name in names}
    opened = os.open(root + "/both", os.O_RDONLY)
    watcher.events()

    def check() -> None:
        assert sorted(os.listdir(root)) == names
        for name in ("new", "newdir", "other"):
            with pytest.raises(FileNotFoundError):
                os.stat(f"{root}/{name}")
        for name, expected in kept.items():
            now = os.stat(f"{root}/{name}")
            for field in ("st_ino", "st_mode", "st_nlink", "st_uid", "st_size", "st_mtime_ns", "st_ctime_ns"):
                assert getattr(now, field) == getattr(expected, field), (name, field)
        for name, text in (("back", b"back"), ("both", b"first"), ("file", b"first")):
            descriptor = os.open(f"{root}/{name}", os.O_RDONLY)
            assert os.read(descriptor, 100) == text
            os.close(descriptor)
        assert os.listdir(root + "/dir") == ["inner"]
        assert os.fstat(opened).st_nlink == 1
        assert os.pread(opened, 100, 0) == b"first"

    try:
        with hammering(check):
            for _ in range(60):
                mount.call("replay_again")
    finally:
        os.close(opened)
    events = watcher.events()
    for event in ("DELETE /new", "DELETE|DIR /newdir", "CREATE /back", "DELETE /both", "CREATE /both", "MODIFY /file"):
        assert events.count(event) == 60, event


@needs_root
def test_the_replay_gives_up_where_something_else_is_mounted_on_top(tmp_path, watcher):
    with served(str(tmp_path), expected_log="another file system is mounted on top") as child:
        child.call("snapshot", name="s")
        write(child.path + "/new")
        subprocess.run(["mount", "-t", "tmpfs", "none", child.path], check=True)
        try:
            write(child.path + "/new", "on top")
            child.call("restore", name="s", replay=True)
            assert os.listdir(child.path) == ["new"]
        finally:
            subprocess.run(["umount", child.path], check=True)
        assert os.listdir(child.path) == []


def test_a_read_only_mount_has_no_events_and_says_so(tmp_path, watcher):
    with served(str(tmp_path), read_only=True, expected_log="the mount is read-only") as child:
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            write(child.path + "/new")
        child.call("replay_something")


NOBODY = 65534


@needs_root
def test_an_unprivileged_daemon_replays_what_it_may_and_no_more(watcher):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # pytest's own are root's alone
        with served(directory, user=NOBODY, allow_other=True) as child:
            root = child.path
            os.chown(root, NOBODY, NOBODY)
            for name in ("own", "of-root"):
                write(f"{root}/{name}", "first")
            os.mkdir(root + "/closed")
            os.chown(root + "/own", NOBODY, NOBODY)
            os.chmod(root + "/own", 0o400)
            child.call("snapshot", name="s")
            for name in ("own", "of-root", "new", "closed/new"):
                write(f"{root}/{name}", "second")
            watcher.add(root, "")
            watcher.add(root + "/closed", "closed")
            assert restored(child, watcher) == ["DELETE /new", "MODIFY /own"]
            for name in ("own", "of-root"):
                with open(f"{root}/{name}") as file:
                    assert file.read() == "first"
            assert sorted(os.listdir(root)) == ["closed", "of-root", "own"]
            assert os.listdir(root + "/closed") == []


@contextmanager
def watching(path: str) -> Iterator[Watcher]:
    """A watch on a file itself."""
    watcher = Watcher()
    watcher.add(path, "itself")
    try:
        yield watcher
    finally:
        os.close(watcher.fd)


def replace(path: str, text: str) -> None:
    """Replace a file by rename, as `sed -i` and most editors do."""
    write(path + ".new", text)
    os.rename(path + ".new", path)


def test_a_watch_on_a_file_that_was_replaced_ends_so_that_a_watcher_watches_the_restored_one(mount):
    write(mount.path + "/file", "first")
    mount.call("snapshot", name="s")
    for _ in range(2):
        replace(mount.path + "/file", "second")
        with watching(mount.path + "/file") as watcher:
            assert restored(mount, watcher) == ["DELETE_SELF itself", "IGNORED itself"]
        with watching(mount.path + "/file") as watcher:
            write(mount.path + "/file", "first")
            assert "MODIFY itself" in watcher.events()


def test_a_watch_on_a_file_that_a_restore_removes_ends(mount):
    mount.call("snapshot", name="s")
    os.mkdir(mount.path + "/new")
    write(mount.path + "/new/file")
    os.mkfifo(mount.path + "/fifo")
    with watching(mount.path + "/new/file") as inside, watching(mount.path + "/fifo") as fifo:
        assert restored(mount, inside) == ["DELETE_SELF itself", "IGNORED itself"]
        assert fifo.events() == ["DELETE_SELF itself", "IGNORED itself"]


def test_a_watch_on_a_file_that_keeps_another_name_goes_on(mount):
    write(mount.path + "/file", "first")
    os.link(mount.path + "/file", mount.path + "/other")
    mount.call("snapshot", name="s")
    os.unlink(mount.path + "/other")
    os.rename(mount.path + "/file", mount.path + "/moved")
    os.link(mount.path + "/moved", mount.path + "/third")
    with watching(mount.path + "/moved") as watcher:
        assert not {"DELETE_SELF itself", "IGNORED itself"} & set(restored(mount, watcher))
        write(mount.path + "/other", "second")
        assert "MODIFY itself" in watcher.events()


def test_a_file_that_is_open_while_its_watch_ends_stays_usable_and_can_come_back(mount):
    write(mount.path + "/file", "first")
    mount.call("snapshot", name="first")
    replace(mount.path + "/file", "second")
    mount.call("snapshot", name="second")
    with open(mount.path + "/file") as file, watching(mount.path + "/file") as watcher:
        assert "DELETE_SELF itself" in restored_to(mount, watcher, "first")
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == "second"
        mount.call("restore", name="second", replay=True)
        assert os.fstat(file.fileno()).st_nlink == 1
        with open(mount.path + "/file", "r+") as same:
            assert os.path.sameopenfile(same.fileno(), file.fileno())
            same.write("SECOND")
        file.seek(0)
        assert file.read() == "SECOND"
    with watching(mount.path + "/file") as watcher:
        assert "DELETE_SELF itself" in restored_to(mount, watcher, "first")


def test_the_root_shows_no_events_for_files_that_are_deleted_for_their_watchers(mount, watcher):
    write(mount.path + "/file", "first")
    mount.call("snapshot", name="s")
    replace(mount.path + "/file", "second")
    watcher.add(mount.path, "")
    assert restored(mount, watcher) == ["DELETE /file", "CREATE /file", "CLOSE_WRITE /file"]
