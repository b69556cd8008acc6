"""The pytest plugin: sessions of pytest, run in this process, whose tests use its fixtures on a real mount."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import read_records

pytest_plugins = ("pytester",)

EXAMPLES = Path(__file__).parents[2] / "examples"
MADE = """
import os, subprocess
import pytest

def run(line, workspace):
    subprocess.run(["sh", "-c", line], cwd=workspace.path, check=True)
"""


@pytest.fixture(autouse=True)
def nothing_left(session_dir: str) -> Iterator[None]:
    yield
    assert [record.name for record in read_records() if record.name.startswith("pytest-")] == []
    assert [name for name in os.listdir(f"{session_dir}/tmp") if name.startswith("vfsd-pytest-")] == []


def passed(pytester: pytest.Pytester, source: str, count: int, *arguments: str) -> None:
    pytester.makepyfile(MADE + source)
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments).assert_outcomes(passed=count)


def test_each_test_gets_the_same_mount_in_its_initial_state(pytester: pytest.Pytester) -> None:
    passed(
        pytester,
        """
seen = set()

@pytest.mark.parametrize("turn", range(4))
def test_starts_clean(workspace, turn):
    assert os.listdir(workspace.path) == []
    assert [each.tag for each in workspace.snapshots()] == ["initial state of the pytest session"]
    with pytest.raises(FileNotFoundError):
        workspace.undo()
    assert not workspace.diff()
    seen.add((workspace.pid, workspace.path))
    assert len(seen) == 1
    run("mkdir -p a/b && echo x >a/b/c && ln -s /nowhere l && chmod 700 .", workspace)
    workspace.snapshot("turn")
    run("rm -rf a", workspace)
    workspace.restore("turn")
    workspace.snapshot("later")
    assert os.stat(workspace.path).st_mode & 0o777 == 0o700
""",
        4,
    )


def test_a_workspace_that_a_test_unmounted_or_killed_is_mounted_again(pytester: pytest.Pytester) -> None:
    passed(
        pytester,
        """
import signal

def leave(workspace):
    with workspace:
        pass

def kill(workspace):
    os.kill(workspace.pid, signal.SIGKILL)

def drop(workspace):
    workspace.drop(*[each.name for each in workspace.snapshots()])

def replace(workspace):
    (initial,) = workspace.snapshots()
    workspace.drop(initial.name)
    workspace.snapshot(initial.name)

@pytest.mark.parametrize("end", [leave, kill, drop, replace, leave])
def test_ends_it(workspace, end):
    assert os.listdir(workspace.path) == []
    run("echo x >left", workspace)
    end(workspace)
""",
        5,
    )


def test_the_arguments_of_the_mount_are_a_fixture_of_the_project(pytester: pytest.Pytester, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "kept").write_text("before")
    passed(
        pytester,
        f"""
@pytest.fixture(scope="session")
def workspace_arguments():
    return {{"backend": "overlay:{tmp_path}/below", "exec_on_host": True}}

@pytest.mark.parametrize("turn", range(2))
def test_sees_the_directory(workspace, turn):
    assert workspace.executor.run(["cat", "kept"]).stdout == b"before"
    run("rm kept", workspace)
""",
        2,
    )
    assert (tmp_path / "below" / "kept").read_text() == "before"


def test_a_host_directory_is_restored_at_the_end_and_keeps_its_own_snapshots(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "kept").write_text("before")
    with Workspace.mount(tmp_path / "own", f"host:{below}") as own:
        own.snapshot("mine")
    passed(
        pytester,
        f"""
@pytest.fixture(scope="session")
def workspace_arguments():
    return {{"backend": "host:{below}"}}

@pytest.mark.parametrize("turn", range(2))
def test_changes_the_directory(workspace, turn):
    assert os.listdir(workspace.path) == ["kept"]
    run("rm kept; echo x >other", workspace)
    workspace.snapshot("of-the-test")
""",
        2,
    )
    assert os.listdir(below) == ["kept"]
    with Workspace.mount(tmp_path / "own", f"host:{below}") as own:
        assert [each.name for each in own.snapshots()] == ["mine"]
        own.drop("mine")


def test_the_factory_mounts_workspaces_that_end_with_the_test(pytester: pytest.Pytester) -> None:
    passed(
        pytester,
        """
paths = []

def test_mounts_two(workspace, workspace_factory):
    one, other = workspace_factory(), workspace_factory(exec_on_host=True)
    paths.extend([one.path, other.path])
    run("echo x >a", one)
    assert os.listdir(other.path) == [] == os.listdir(workspace.path)
    assert other.executor.run(["pwd"]).stdout.decode().strip() == other.path

def test_finds_neither():
    assert [path for path in paths if os.path.lexists(path)] == []
""",
        2,
    )


def test_the_example_passes(pytester: pytest.Pytester) -> None:
    shutil.copy(EXAMPLES / "test_with_workspace.py", pytester.path)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)


@pytest.mark.extended
def test_a_session_that_uses_no_fixture_imports_no_client_and_mounts_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test_other():
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("vfsd", "protocol", "trio", "msgspec")]
    assert sorted(loaded) == ["vfsd", "vfsd.integrations", "vfsd.integrations.pytest_plugin"]
"""
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:anyio").assert_outcomes(passed=1)


@pytest.mark.extended
@pytest.mark.slow
def test_a_session_unmounts_what_a_killed_session_left(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_hangs="""
import time

def test_hangs(workspace):
    open(workspace.path + "/started", "w").close()
    time.sleep(600)
""",
        test_other="""
def test_other(workspace):
    pass
""",
    )
    session = subprocess.Popen([sys.executable, "-m", "pytest", "test_hangs.py"], stdout=subprocess.DEVNULL)

    try:
        wait_until(lambda: any(os.path.exists(f"{each.mountpoint}/started") for each in read_records()), "started")
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
    pytester.runpytest_subprocess("test_other.py").assert_outcomes(passed=1)
