"""The rules of conftest.py hold: what a test leaves behind is found, named and removed; no skip is silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import hang_watch
from tests.support.leaks import TAG, Leaks, mounts
from tests.support.rights import needs_root
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


def start(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that has reached its own code (so its environment can be read)."""
    process = subprocess.Popen(SLEEPER, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def run_pytest(directory: Path, source: str, **env: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(directory), "-c", os.devnull, str(directory / "test_inner.py")]
    inherited = {key: value for key, value in os.environ.items() if key not in ("VFSD_NO_SKIP", "VFSD_LONG")}
    inherited["VFSD_TEST_GRACE_S"] = "1"
    inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    inherited["PYTEST_DEBUG_TEMPROOT"] = str(directory)
    return subprocess.run(
        command, cwd=REPOSITORY, env=inherited | env, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grace for processes that will not end by themselves."""
    monkeypatch.setattr("tests.support.leaks.GRACE_S", 0.2)


@pytest.mark.usefixtures("quick")
def test_a_child_left_running_is_named_and_ended() -> None:
    leaks = Leaks("some other session", [])
    child = start({})

    found = leaks.settle()

    assert len(found) == 1
    assert f"process {child.pid} (" in found[0]
    assert child.wait(timeout=10) < 0
    assert leaks.settle() == []


@pytest.mark.usefixtures("quick")
def test_a_daemon_that_left_its_parent_is_found_by_the_sessions_tag(tmp_path: Path) -> None:
    tag = str(tmp_path)
    leaks = Leaks(tag, [])
    fork_off = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({SLEEPER!r}, stdout=-1, stderr=-3, start_new_session=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", fork_off], env={TAG: tag}, capture_output=True, text=True, check=True, timeout=60
    )
    daemon = int(result.stdout)

    assert [line.split(" (")[0] for line in leaks.settle()] == [f"process {daemon}"]
    assert leaks.processes() == []


def test_what_ran_before_and_what_other_sessions_run_is_left_alone(tmp_path: Path) -> None:
    tag = str(tmp_path)
    earlier = start({TAG: tag})
    try:
        assert Leaks(tag, []).settle() == []
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()


@pytest.mark.fuse
@needs_root
def test_a_mount_is_found_below_the_roots_only_and_unmounted(workdir: Path) -> None:
    inside, outside = workdir / "in side", workdir / "outside"
    inside.mkdir()
    outside.mkdir()
    leaks = Leaks("", [str(inside)])
    try:
        for directory in (inside, outside):
            subprocess.run(["mount", "-t", "tmpfs", "leak", directory], check=True)

        assert leaks.settle() == [f"mount {inside} (type tmpfs, source leak)"]
        assert {mount.mountpoint for mount in mounts() if mount.source == "leak"} >= {str(outside)}
        assert str(inside) not in {mount.mountpoint for mount in mounts()}
    finally:
        subprocess.run(["umount", "-l", outside], check=True)


def test_a_test_that_leaves_a_process_fails(tmp_path: Path) -> None:
    source = "import subprocess\ndef test_leaks():\n    global child\n    child = subprocess.Popen(['sleep', '600'])\n"

    result = run_pytest(tmp_path, source)

    assert result.returncode == 1
    assert "left behind (and now cleaned up):" in result.stdout
    assert "(sleep 600)" in result.stdout


SKIPS = """
import pytest
def test_skips_itself():
    pytest.skip("no such thing here")
@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
@pytest.mark.long
def test_takes_long():
    pass
"""


def test_a_skip_is_a_skip_unless_the_environment_forbids_it(tmp_path: Path) -> None:
    usual = run_pytest(tmp_path, SKIPS)
    assert usual.returncode == 0
    assert "1 skipped, 1 deselected, 1 xfailed" in usual.stdout

    strict = run_pytest(tmp_path, SKIPS, VFSD_NO_SKIP="1")
    assert strict.returncode == 1
    assert "1 failed, 1 deselected, 1 xfailed" in strict.stdout
    assert "no such thing here" in strict.stdout


def test_a_module_that_skips_as_a_whole_fails_where_the_environment_forbids_it(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "import pytest\npytest.importorskip('no_such_module')\n", VFSD_NO_SKIP="1")

    assert result.returncode != 0
    assert "no_such_module" in result.stdout


def test_long_tests_run_when_asked_for(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, SKIPS, VFSD_LONG="1")

    assert "1 passed, 1 skipped, 1 xfailed" in result.stdout


def test_the_users_workspaces_are_out_of_sight(session_dir: str) -> None:
    assert os.environ["VFSD_RUNTIME_DIR"] == f"{session_dir}/run"
    assert "VFSD_WORKSPACE" not in os.environ


@pytest.mark.parametrize(
    "how", ["tempfile.mkdtemp(prefix='mine-')", "__import__('subprocess').run(['mktemp', '-t', 'mine-XXX'])"]
)
def test_a_temporary_file_left_behind_is_named_and_removed(tmp_path: Path, how: str) -> None:
    done = run_pytest(tmp_path, f"import os, tempfile\ndef test_it():\n    {how}\n")
    assert done.returncode == 1
    assert "temporary files left behind" in done.stdout
    assert "mine-" in done.stdout
    assert list(tmp_path.glob("vfsd-test-*")) == []


def test_a_run_without_failures_leaves_no_temporary_directory(tmp_path: Path) -> None:
    source = (
        "import os\ndef test_it(tmp_path, workdir):\n    (tmp_path / 'y').touch()\n    os.chdir(workdir)\n"
        "    for _ in range(1500):\n        os.mkdir('d')\n        os.chdir('d')\n    os.chdir('/')\n"
    )
    done = run_pytest(tmp_path, source, PYTEST_ADDOPTS="-o tmp_path_retention_policy=failed")
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["test_inner.py"]


def test_a_test_that_hangs_shows_where_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_HANGS_S", 0.1)
    monkeypatch.setattr(hang_watch, "_SET_EVERY_S", 0.0)
    output = tmp_path / "output"
    with output.open("wb") as file:
        watch = hang_watch.HangWatch(file.fileno())
        try:
            watch.test_begins()
            wait_until(lambda: "in wait_until" in output.read_text(), "the stack of this test")
        finally:
            watch.end()
