"""A repository below, work above, on each engine: what real tools do in an overlay, and what goes down again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mount.conftest import MountIt, check_invariants, complaints
from tests.mount.programs import succeeded, vfsd
from tests.support.waiting import wait_until
from vfsd.client.arguments import mount_options
from vfsd.client.connection import daemon_end
from vfsd.client.launch import launch
from vfsd.client.workspace import Workspace

BLOCK = 128 * 1024
VFSD = (sys.executable, "-m", "vfsd.cli.main")
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def run(*command: object, cwd: Path, stdin: bytes | None = None) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    environment.pop("MAKEFLAGS", None)
    done = subprocess.run([os.fspath(c) if isinstance(c, Path) else str(c) for c in command], cwd=cwd, input=stdin,
                          capture_output=True, check=False, env=environment)  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.decode()


def contents(place: Path, *, without: str | None = None) -> dict[str, tuple[object, ...]]:
    """Every path below `place`: mode, and what it holds."""
    found: dict[str, tuple[object, ...]] = {}
    for above, directories, files in os.walk(place):
        if without in directories:
            directories.remove(without)
        for name in [*directories, *files]:
            path = Path(above, name)
            at = path.lstat()
            held: object = None
            if path.is_symlink():
                held = os.readlink(path)
            elif path.is_file():
                held = path.read_bytes()
            found[str(path.relative_to(place))] = (at.st_mode, held)
    return found


def digest(place: Path) -> str:
    """Of everything below `place`, with the times that a write would move."""
    seen = []
    for above, directories, files in os.walk(place):
        for name in sorted([*directories, *files]):
            at = os.lstat(Path(above, name))
            seen.append((above, name, at.st_ino, at.st_mode, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    return hashlib.sha256(repr((sorted(seen), contents(place))).encode()).hexdigest()


@pytest.fixture
def repository(workdir: Path) -> Path:
    """A small C program with a makefile and its test, in git."""
    place = workdir / "repository"
    (place / "src").mkdir(parents=True)
    (place / "src" / "sum.c").write_text("int sum(int a, int b) { return a + b; }\n")
    (place / "src" / "main.c").write_text(
        '#include <stdio.h>\nint sum(int, int);\nint main(void) { printf("%d\\n", sum(2, 3)); return 0; }\n'
    )
    (place / "test.py").write_text(
        "import subprocess, unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(subprocess.check_output(['./sum']), b'5\\n')\n"
    )
    (place / "Makefile").write_text("sum: src/sum.c src/main.c\n\tcc -o $@ $^\n")
    (place / ".gitignore").write_text("/sum\n__pycache__/\n")
    (place / "docs").mkdir()
    for number in range(60):
        (place / "docs" / f"page{number}.md").write_text(f"page {number}\n" * 20)
    run("git", "init", "-q", "-b", "main", cwd=place)
    run(*GIT, "add", "-A", cwd=place)
    run(*GIT, "commit", "-qm", "first", cwd=place)
    return place


@pytest.mark.extended
def test_a_repository_is_built_tested_changed_and_the_changes_go_to_other_clones(
    mount: MountIt, repository: Path, workdir: Path
) -> None:
    patched, applied = workdir / "patched", workdir / "applied"
    for clone in (patched, applied):
        run("cp", "-a", repository, clone, cwd=workdir)
    before = digest(repository)
    workspace = mount(backend=f"overlay:{repository}")
    root = Path(workspace.path)
    assert run(*GIT, "status", "--porcelain", cwd=root) == ""
    run("make", "sum", cwd=root)
    run(sys.executable, "-m", "unittest", "test.py", cwd=root)
    (root / "src" / "sum.c").write_text("int sum(int a, int b) { return b + a; }\n")
    (root / "src" / "new.c").write_text("int zero;\n")
    (root / "docs" / "page7.md").unlink()
    (root / "docs" / "page8.md").rename(root / "src" / "moved.md")
    assert run(*GIT, "status", "--porcelain", cwd=root).split() == [
        "D", "docs/page7.md", "D", "docs/page8.md", "M", "src/sum.c", "??", "src/moved.md", "??", "src/new.c"
    ]  # fmt: skip
    run(*GIT, "clean", "-fdxq", "-e", "/src/", cwd=root)
    worked_on = [root / name for name in os.listdir(root) if name != ".git"]
    found = {change.path: change.change for change in workspace.diff(paths=worked_on).changes}
    assert found == {
        "docs/page7.md": "removed",
        "docs/page8.md": "removed",
        "src/moved.md": "added",
        "src/new.c": "added",
        "src/sum.c": "modified",
    }
    patch = run(*VFSD, "-w", workspace.name, "diff", "--patch", "--", *worked_on, cwd=root).encode()
    run("patch", "-p1", "--quiet", cwd=patched, stdin=patch)
    assert contents(patched, without=".git") == contents(root, without=".git")
    other = mount(backend=f"overlay:{applied}")
    run("patch", "-p1", "--quiet", cwd=Path(other.path), stdin=patch)
    assert contents(applied) == contents(repository), "nothing goes down before it is applied"
    run(*VFSD, "-w", other.name, "apply", cwd=root)
    assert contents(applied, without=".git") == contents(root, without=".git")
    assert other.diff().changes == ()
    assert digest(repository) == before, "what is below was changed"
    run(*GIT, "add", "-A", cwd=root)
    run(*GIT, "commit", "-qm", "second", cwd=root)
    assert digest(repository) == before, "what is below was changed"
    everything = contents(root)
    workspace.discard()
    assert contents(root) == contents(repository)
    workspace.undo()
    assert contents(root) == everything
    assert digest(repository) == before


def test_a_refused_apply_names_the_commands_that_take_either_side(mount: MountIt, repository: Path) -> None:
    workspace = mount(backend=f"overlay:{repository}", may_say="changed a file below the overlay")
    mine, theirs = Path(workspace.path) / "src" / "sum.c", repository / "src" / "sum.c"

    def vfsd(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vfsd.cli.main", *words, "-w", workspace.name]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    assert "no earlier restore, import, merge, adoption, apply or discard" in vfsd("restore", "--undo").stderr
    mine.write_text("mine\n")
    theirs.write_text("theirs\n")
    refused = vfsd("apply")
    assert refused.returncode == 1
    assert "1 conflict in" in refused.stderr
    assert "`vfsd apply --force` overwrites changed files" in refused.stderr
    assert "`vfsd discard PATH` drops the change of the workspace" in refused.stderr
    assert theirs.read_text() == "theirs\n"
    assert vfsd("apply", "--force").returncode == 0
    assert theirs.read_text() == "mine\n"


def _truncate(place: Path) -> None:
    place.write_text("mine\n")


def _write(place: Path) -> None:
    with place.open("r+") as file:
        file.write("mine")


def _rename_over(place: Path) -> None:
    other = place.with_name("other")
    other.write_text("mine\n")
    other.rename(place)


CHANGES = {
    "truncate": _truncate,
    "write": _write,
    "over": _rename_over,
    "unlink": Path.unlink,
    "chmod": lambda place: place.chmod(0o600),
    "xattr": lambda place: os.setxattr(place, "user.x", b"1"),
}


@pytest.mark.extended
@pytest.mark.parametrize("read_before", [True, False], ids=["read", "unread"])
def test_apply_protects_what_others_wrote_after_the_workspace_changed_the_file_however_it_did(
    engine: str, workdir: Path, read_before: bool
) -> None:
    place = workdir / "below"
    place.mkdir()
    for name in CHANGES:
        (place / name).write_text("first\n")
    daemon = f"{workdir.name}-p"
    with Workspace.mount(workdir / "m", engine=engine, name=daemon, backend=f"overlay:{place}") as workspace:
        root = Path(workspace.path)
        with contextlib.ExitStack() as held:
            files = [held.enter_context((root / name).open()) for name in CHANGES]  # the daemon keeps the inodes
            if read_before:
                assert {file.read() for file in files} == {"first\n"}
            for name, change in CHANGES.items():
                change(root / name)
            (root / "new").write_text("new\n")
            for name in CHANGES:
                (place / name).write_text("others\n")
            deadline = time.monotonic() + 20
            while (workspace.status().changed_below or 0) < len(CHANGES):  # the daemon has looked at each of them
                assert time.monotonic() < deadline, "never seen"
                time.sleep(0.05)
            refused = workspace.apply()
            assert not refused.applied
            assert refused.conflicts == dict.fromkeys(CHANGES, "was changed by another program")
            assert {(place / name).read_text() for name in CHANGES} == {"others\n"}
            assert not (place / "new").exists()
        assert workspace.apply(force=True).applied
        assert (place / "over").read_text() == "mine\n"
        assert not (place / "unlink").exists()
        check_invariants(workspace)
    assert ["changed a file below" in line for line in complaints(daemon)] == [True] * len(CHANGES)


def test_apply_refuses_to_remove_a_directory_to_which_others_added_a_file(mount: MountIt, workdir: Path) -> None:
    place = workdir / "below"
    (place / "d").mkdir(parents=True)
    (place / "d" / "old").write_text("old\n")
    workspace = mount(backend=f"overlay:{place}")
    root = Path(workspace.path)
    (root / "a").write_text("new\n")
    shutil.rmtree(root / "d")
    (place / "d" / "theirs").write_text("theirs\n")
    refused = workspace.apply()
    assert not refused.applied
    assert list(refused.conflicts) == ["d/theirs"]
    assert sorted(os.listdir(place)) == ["d"]
    assert sorted(os.listdir(place / "d")) == ["old", "theirs"]


@pytest.mark.extended
@pytest.mark.both_engines
def test_mounting_looks_at_no_file_whatever_is_below(mount: MountIt, workdir: Path) -> None:
    place = workdir / "many"
    for directory in range(200):
        (place / f"d{directory}").mkdir(parents=True)
        for file in range(100):
            (place / f"d{directory}" / f"f{file}").touch()
    workspace = mount(backend=f"overlay:{place}")
    status = workspace.status()
    assert (status.files, status.directories) == (0, 1)
    shown = run(*VFSD, "status", workspace.name, cwd=workdir)
    assert "files\t0\n" in shown
    assert "counted\twhat was read or changed so far;" in shown
    assert (Path(workspace.path) / "d7" / "f7").read_bytes() == b""
    status = workspace.status()
    assert (status.files, status.directories) == (1, 2)
    assert len(os.listdir(workspace.path)) == 200


EDITS = 16


def test_one_byte_of_a_file_of_a_gibibyte_costs_a_block(mount: MountIt, workdir: Path) -> None:
    place = workdir / "below"
    place.mkdir()
    with (place / "big").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"d" * BLOCK * (EDITS + 1))
    workspace = mount(backend=f"overlay:{place}")
    (place / "small").write_bytes(b"small")
    with (Path(workspace.path) / "small").open("r+b") as file:
        file.write(b"!")  # what any first write costs is not counted
    used = workspace.status().used_bytes or 0
    before = rss_bytes(workspace.status().pid)
    # Several, since a heap may grow by a huge page (2 MiB) at once.
    for number in range(1, EDITS + 1):
        with (Path(workspace.path) / "big").open("r+b") as file:
            file.seek((1 << 29) + number * BLOCK + 7)
            file.write(b"!")
        assert workspace.status().used_bytes == used + number * BLOCK
    assert (rss_bytes(workspace.status().pid) - before) / EDITS < 1 << 20
    with (Path(workspace.path) / "big").open("rb") as file:
        file.seek((1 << 29) + BLOCK + 6)
        assert file.read(3) == b"d!d"


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_excluded_is_not_there(mount: MountIt, repository: Path, workdir: Path) -> None:
    (repository / ".env").write_text("secret")
    workspace = mount(backend=f"overlay:{repository}", exclude=[".env", "/docs/"])
    root = Path(workspace.path)
    assert sorted(os.listdir(root)) == [".git", ".gitignore", "Makefile", "src", "test.py"]
    with pytest.raises(FileNotFoundError):
        (root / ".env").read_text()
    with pytest.raises(PermissionError):
        (root / ".env").write_text("mine")
    workspace.export(workdir / "all.zip")
    listed = run("unzip", "-l", workdir / "all.zip", cwd=workdir) if os.path.exists("/usr/bin/unzip") else ""
    assert ".env" not in listed


@pytest.mark.extended
@pytest.mark.both_engines
@pytest.mark.both_engines
def test_a_file_that_changes_below_is_followed_and_reported(engine: str, repository: Path, workdir: Path) -> None:
    name = f"{workdir.name}-f"
    with Workspace.mount(workdir / "m", engine=engine, name=name, backend=f"overlay:{repository}") as workspace:
        page = Path(workspace.path, "docs", "page1.md")
        for _ in range(2):
            assert len(page.read_bytes()) == 140  # all of it is in the kernel now, which asks no more
        whole = "theirs, much longer than before" * 9000
        (repository / "docs" / "page1.md").write_text(whole)
        deadline = time.monotonic() + 20
        found = ""
        while found != whole:  # the first reads may fail, until the kernel was told
            assert time.monotonic() < deadline, "never seen"
            with contextlib.suppress(OSError):
                found = page.read_text()
                assert found in ("page 1\n" * 20, whole)
        assert workspace.status().changed_below == 1
        page, below = page.with_name("page2.md"), repository / "docs" / "page2.md"
        with page.open("ab", 0) as file, below.open("ab", 0) as other:
            assert len(page.read_bytes()) == 140
            other.write(b"from below\n")
            file.write(b"one\n")
            file.write(b"two\n")

        def is_appended() -> bool:
            with contextlib.suppress(OSError):  # as above
                return page.read_bytes() == below.read_bytes() + b"one\ntwo\n"
            return False

        wait_until(is_appended)
        check_invariants(workspace)
    assert ["changed a file below" in line for line in complaints(name)] == [True, True]


def test_a_snapshot_shows_no_content_that_other_programs_wrote_below_after_it(
    engine: str, repository: Path, workdir: Path
) -> None:
    lost = "another program changed it below the overlay since, so its content in the snapshot is lost"
    name = f"{workdir.name}-s"
    with Workspace.mount(workdir / "m", engine=engine, name=name, backend=f"overlay:{repository}") as workspace:
        root = Path(workspace.path)
        (root / "src" / "sum.c").read_text()
        workspace.snapshot("s1")
        (repository / "src" / "sum.c").write_text("theirs, and longer than before\n")
        (repository / "test.py").write_text("theirs, and nobody had read it\n")
        for name in ("src/sum.c", "test.py"):
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                (root / ".snapshots" / "s1" / name).read_text()
        found = workspace.diff("s1")
        assert {change.path: change.change for change in found.changes} == {
            "src/sum.c": "modified",
            "test.py": "modified",
        }
        assert found.problems == dict.fromkeys(("src/sum.c", "test.py"), lost)
        with pytest.raises(OSError, match=r"content in the snapshot is lost.*src/sum\.c"):
            workspace.export(workdir / "s1.zip", snapshot="s1")
        restored = workspace.restore("s1")
        assert restored.problems == found.problems
        assert not restored.changes
        assert (root / "src" / "sum.c").read_text() == "theirs, and longer than before\n"
        assert workspace.restore("s1", [root / "Makefile"]).problems == {}
        assert (root / ".snapshots" / "s1" / "Makefile").read_text() == (repository / "Makefile").read_text()
        with workspace.fork(workdir / "of-snapshot", snapshot="s1") as fork:
            copy = Path(fork.path)
            with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
                (copy / "src" / "sum.c").read_text()
            (copy / "new").write_text("new\n")
            assert fork.apply().conflicts == dict.fromkeys(("src/sum.c", "test.py"), "was changed by another program")
            merged = workspace.merge(fork)
            assert [change.path for change in merged.changes] == ["new"]
        with workspace.fork(workdir / "of-now") as fork:
            (repository / "Makefile").write_text("theirs\n")
            assert (Path(fork.path) / ".gitignore").read_text()
            (Path(fork.path) / "more").write_text("more\n")
            (root / "Makefile").write_text("mine, after theirs\n")
            merged = workspace.merge(fork)  # what changed below both is no change of the fork
            assert merged.applied
            assert [change.path for change in merged.changes] == ["more"]
        check_invariants(workspace)
    assert all("changed a file below" in line for line in complaints(name))


def test_an_export_of_the_changes_holds_only_them(mount: MountIt, repository: Path, workdir: Path) -> None:
    workspace = mount(backend=f"overlay:{repository}")
    (Path(workspace.path) / "src" / "new.c").write_text("new")
    done = workspace.export(workdir / "changes.zip", changes_only=True)
    assert done.files == 1


# -- an apply that is killed -----------------------------------------------------------------------------
KILLED_HALF_WAY = """
import os, signal, sys
from tests.unit.protocol.backends.overlay.killed_apply import apply_work
root = sys.argv[1]
def before():
    if os.path.exists(os.path.join(root, ".vfsd-apply", "plan")) and not os.path.exists(os.path.join(root, "a")):
        os.kill(os.getpid(), signal.SIGKILL)
apply_work(root, before)
"""


@pytest.fixture
def half_applied(workdir: Path) -> Path:
    """A directory in which an apply was killed that had begun to write."""
    place = workdir / "half"
    for path, data in (
        ("src/main.c", b"main"), ("src/deep/x", b"x"), ("big", b"b" * (3 * BLOCK)), ("README", b"read me"),
        ("old/1", b"1"), ("old/2", b"2"), *((f"gone/{number}", b"") for number in range(4)),
    ):  # fmt: skip
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    os.symlink("src/main.c", place / "link")
    command, repository = [sys.executable, "-c", KILLED_HALF_WAY, place], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=repository, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (place / "a").exists()
    return place


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["overlay", "host"])
def test_the_next_mount_of_the_directory_finishes_an_apply_and_says_so(
    workdir: Path, half_applied: Path, engine: str, backend: str
) -> None:
    (workdir / "m").mkdir()
    options = mount_options(workdir / "m", f"{backend}:{half_applied}", name=workdir.name, engine=engine)  # type: ignore[arg-type]
    ready = launch(options)
    with Workspace.attach(ready.name) as workspace:
        assert "an earlier apply was killed; its remaining" in str(ready.recovered)
        assert (Path(workspace.path) / "README").read_bytes() == b"READ me"
        assert (half_applied / "a" / "twin").exists()
        assert ".vfsd-apply" not in os.listdir(half_applied)
        assert workspace.status().interrupted is None
        workspace.unmount()
    assert len(complaints(workdir.name)) == 1


@pytest.mark.extended
def test_status_tells_of_an_apply_that_was_killed_and_the_next_one_finishes_it(
    mount: MountIt, half_applied: Path, workdir: Path
) -> None:
    place = workdir / "below"
    place.mkdir()
    workspace = mount(backend=f"overlay:{place}")
    (Path(workspace.path) / "mine").write_text("mine")
    assert workspace.status().interrupted is None
    for name in os.listdir(half_applied):
        (half_applied / name).rename(place / name)  # the same files: nobody follows an intent log that was copied
    assert "`vfsd apply` finishes it" in str(workspace.status().interrupted)
    done = workspace.apply()
    assert done.applied
    assert "are written now" in str(done.recovered)
    assert (place / "mine").read_text() == "mine"
    assert ".vfsd-apply" not in os.listdir(place)
    assert workspace.status().interrupted is None


def held(place: Path) -> dict[str, object]:
    return {path: data for path, (_, data) in contents(place).items()}


@pytest.mark.extended
def test_a_daemon_killed_while_it_applies_leaves_the_directory_whole(workdir: Path, engine: str) -> None:
    place, chance = workdir / "below", random.SystemRandom()
    place.mkdir()
    (workdir / "m").mkdir()
    options = mount_options(workdir / "m", f"overlay:{place}", name=workdir.name, engine=engine)  # type: ignore[arg-type]
    after: dict[str, object] = {}
    for number in range(120):
        (place / f"f{number}").write_text("old")
    before = held(place)
    for attempt in range(4):
        ready = launch(options)  # finishes, or undoes
        assert held(place) in (before, after)
        before = held(place)
        root = Path(ready.mountpoint)
        for number in range(100):
            (root / f"f{number}").write_text(f"new {attempt}")
            (root / f"made{attempt}-{number}").write_text("new")
        for number in range(attempt * 5, attempt * 5 + 5):
            (root / f"f{100 + number}").unlink(missing_ok=True)
        after = held(root)
        with daemon_end(ready.pid) as wait_ended:
            command = [sys.executable, "-m", "vfsd.cli.main", "-w", ready.name, "apply"]
            applying = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                applying.wait(chance.uniform(0.2, 0.6))  # at some moment of it, or before, or after
            os.kill(ready.pid, signal.SIGKILL)
            wait_ended()
            applying.wait()
    last = launch(options)
    assert held(place) in (before, after)
    with Workspace.attach(last.name) as workspace:
        workspace.unmount()


def test_diff_begins_at_the_newest_snapshot_and_without_one_at_the_directory_below(
    mount: MountIt, workdir: Path
) -> None:
    below = workdir / "below"
    below.mkdir()
    workspace = mount(backend=f"overlay:{below}")
    top = Path(workspace.path)
    (top / "a").touch()
    found = workspace.diff()
    assert (found.a, [change.path for change in found.changes]) == (f"overlay:{below}", ["a"])
    workspace.snapshot("s1")
    (top / "b").touch()
    found = workspace.diff()
    assert (found.a, [change.path for change in found.changes]) == ("s1", ["b"])
    assert workspace.patch().startswith(b"diff --git a/b b/b\n")
    assert [change.path for change in workspace.diff(b="s1").changes] == ["a"]
    assert [change.path for change in workspace.diff("").changes] == ["a", "b"]
    for states, shown in {"..": "A a\nA b\n", "..s1": "A a\n", "s1..": "A b\n", "s1..s1": ""}.items():
        assert succeeded(vfsd("diff", "-w", workspace.name, states)) == shown
