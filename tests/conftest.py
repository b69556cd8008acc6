"""Rules that every test runs under: nothing left behind, nothing of the user's touched, no silent skip.

Environment:
    VFSD_NO_SKIP=1      a skipped test is a failed one (CI, where FUSE and Podman are present)
    VFSD_LONG=1         same as --runs-long: also tests marked `long`, and many more hypothesis examples
    HYPOTHESIS_PROFILE  "ci", "dev" or "long"; default "ci" where CI is set, else "dev"
"""

from __future__ import annotations

import contextlib
import functools
import gc
import getpass
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, settings

from tests.support import zygote
from tests.support.durations import CpuPlugin, DurationsPlugin, record_of
from tests.support.hang_watch import HangWatch
from tests.support.leaks import TAG, Leaks, mounts, open_files
from tests.support.lower_layers import LAYERS
from tests.support.progress import ProgressPlugin
from tests.support.schedule import slow_first
from tests.support.suites import SUITES, is_extended, one_of
from vfsd.client.workspace import Workspace
from vfsd.machine import selection

_NO_SKIP = os.environ.get("VFSD_NO_SKIP", "") not in ("", "0")
_FAILED_SKIP = "skipped, and VFSD_NO_SKIP is set: {}"
# A short path: what lies below may hold a Unix socket, whose address has 108 bytes (unix(7)).
_SESSION_DIR = pytest.StashKey[str]()
_HANG_WATCH = pytest.StashKey[HangWatch]()
_PYTEST_ROOT = "PYTEST_DEBUG_TEMPROOT"  # where pytest puts its own temporary directories
_REMOVALS = 10
_PRINTED = 15  # lines of a failed test's output
_REMOVAL_PAUSE_S = 0.2

# A deadline measures the machine; each profile reports how to reproduce what it found.
_COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", _COMMON, max_examples=25)
# The same examples in each run of CI: the same change always gets the same answer (see tests/support/seeds.py).
settings.register_profile("ci", _COMMON, max_examples=25, derandomize=True)
settings.register_profile("long", _COMMON, max_examples=2000, stateful_step_count=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runs-long", action="store_true", help="also long differential runs (or VFSD_LONG=1)")
    parser.addoption("--suite", choices=SUITES, default="all", help="see tests/support/suites.py; default: all")


def _is_long(config: pytest.Config) -> bool:
    return bool(config.getoption("--runs-long")) or os.environ.get("VFSD_LONG", "") not in ("", "0")


@pytest.fixture(scope="session")
def runs_long(request: pytest.FixtureRequest) -> bool:
    """Whether random campaigns run for long in this session."""
    return _is_long(request.config)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts pytest in the background has SIGINT ignored in it, and in all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup(1) has it ignored
    config.stash[_HANG_WATCH] = HangWatch()
    config.addinivalue_line("markers", "container: needs Podman")
    config.addinivalue_line("markers", "extended: runs in `make test-all`, not in `make test`")
    config.addinivalue_line("markers", "short: runs in `make test`, although its module is marked `extended`")
    config.addinivalue_line("markers", "long: takes minutes; runs only with --runs-long or VFSD_LONG=1")
    if not config.getoption("--hypothesis-profile", None):
        usual = "long" if _is_long(config) else "ci" if os.environ.get("CI") else "dev"
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or usual)
    if not hasattr(config, "workerinput"):
        record = record_of(config.getoption("--suite"))
        config.pluginmanager.register(ProgressPlugin(config, record))
        config.pluginmanager.register(DurationsPlugin(record))
    config.pluginmanager.register(CpuPlugin())
    # pytest's own directories stay outside of the session's, where those of failed tests can be looked at.  Workers
    # inherit the variable.
    root = os.environ.setdefault(_PYTEST_ROOT, tempfile.gettempdir())
    # Before collection: no module of vfsd may see the user's workspaces, nor git the user's settings.
    directory = tempfile.mkdtemp(prefix="vfsd-test-", dir=root)
    config.stash[_SESSION_DIR] = directory
    os.chmod(directory, 0o711)  # tests act as other users, too
    # Temporary files of tests, daemons and programs: what one leaves is found, and gone after the session.
    os.mkdir(f"{directory}/tmp")
    os.chmod(f"{directory}/tmp", 0o1777)
    os.environ["TMPDIR"] = f"{directory}/tmp"
    tempfile.tempdir = None
    os.mkdir(f"{directory}/run", 0o700)
    os.mkdir(f"{directory}/work")
    os.environ[TAG] = directory
    os.environ["VFSD_RUNTIME_DIR"] = f"{directory}/run"
    os.environ["VFSD_STORE_DIR"] = f"{directory}/store"
    os.environ["XDG_STATE_HOME"] = f"{directory}/state"
    os.environ.pop("VFSD_WORKSPACE", None)
    # With a directory that `su` left there of root's, execvp(3) says EACCES of every program that is missing.
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(each for each in path if _may_be_searched(each))
    os.environ["VFSD_FORK_SERVER"] = "off"  # tests of the fork server have their own (tests/support/fork_server.py)
    os.environ.update(GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1")
    for role in ("AUTHOR", "COMMITTER"):
        os.environ.update({f"GIT_{role}_NAME": "Test", f"GIT_{role}_EMAIL": "test@example.org"})


def _may_be_searched(directory: str) -> bool:
    try:
        os.stat(f"{directory}/.")
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if _HANG_WATCH in config.stash:
        config.stash[_HANG_WATCH].end()
    directory = config.stash.get(_SESSION_DIR, None)
    # What could not be unmounted was reported; deleting through it would touch what is not ours.
    if directory is not None and not any(mount.mountpoint.startswith(f"{directory}/") for mount in mounts()):
        _remove(directory)
    if directory is not None and not hasattr(config, "workerinput"):
        # Empty where pytest kept nothing of this session, and no other one runs.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(os.environ[_PYTEST_ROOT], f"pytest-of-{getpass.getuser()}"))


def _remove(directory: str) -> None:
    """Remove a directory, although a process that ends may still write there.

    By rm: before Python 3.13 shutil.rmtree fails with RecursionError on trees as deep as some tests make, which left
    the session's directory behind.
    """
    for _ in range(_REMOVALS):
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False)
        if not os.path.lexists(directory):
            return
        time.sleep(_REMOVAL_PAUSE_S)
    subprocess.run(["rm", "-rf", "--", directory], check=True)  # says what is in the way


@pytest.hookimpl(trylast=True)  # pytest has grouped the tests by their fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = config.getoption("--suite")
    _deselect(config, items, lambda item: not _is_long(config) and item.get_closest_marker("long") is not None)
    _deselect(config, items, lambda item: suite != "all" and (suite == "rest") != _is_extended(item))
    if (worker := getattr(config, "workerinput", None)) is not None:
        items[:] = slow_first(
            items,
            lambda item: item.get_closest_marker("slow") is not None,
            worker["workercount"],
            lambda item: item.get_closest_marker("container") is not None,  # one Podman service and its images
        )


def _is_extended(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return is_extended(item, item.nodeid.partition("::")[0], callspec.params if callspec else {})


def _deselect(config: pytest.Config, items: list[pytest.Item], is_out: Callable[[pytest.Item], bool]) -> None:
    """Leave tests out.  Deselected, not skipped: pytest counts them in its last line, and CI does not miss them."""
    out = [item for item in items if is_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        left_out = set(out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # some hundred thousand objects, which each later collection would visit


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_HANG_WATCH].test_begins()
    _name_context(item.nodeid.partition("::")[0])
    if item.get_closest_marker("fuse"):
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip("/dev/fuse cannot be opened")
        if shutil.which("fusermount3") is None:
            pytest.skip("fusermount3 is missing: install fuse3")
    if item.get_closest_marker("container") and shutil.which("podman") is None:
        pytest.skip("podman is missing")


def _name_context(module: str) -> None:
    """Tell coverage, here and in the processes that the test starts, which test module reaches lines now."""
    if "coverage" in sys.modules and (measured := sys.modules["coverage"].Coverage.current()) is not None:
        measured.switch_context(module)
        measured.config.context = module
        os.environ["COVERAGE_PROCESS_CONFIG"] = measured.config.serialize()  # what `patch = subprocess` passes on


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure also reports as skipped; xfail_strict keeps those honest.
    if _NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome = "failed"
        report.longrepr = _FAILED_SKIP.format(reason)
    if report.failed and item.config.option.verbose < 1:
        report.sections = [(title, _end(text)) for title, text in report.sections]
    return report


def _end(text: str) -> str:
    """The last lines of what a failed test printed: its failure fits a screen (`-v` shows all)."""
    lines = text.splitlines(keepends=True)
    return text if len(lines) <= _PRINTED else f"... {len(lines) - _PRINTED} lines (-v)\n" + "".join(lines[-_PRINTED:])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _NO_SKIP and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome = "failed"
        report.longrepr = _FAILED_SKIP.format(reason)
    return report


# What a test may leave open: a module's fixture that opens a connection when it is used first.
_FILES_LEFT = 20
_FILES_CLOSE_S = 10.0


def _opened() -> dict[int, str]:
    """What is open, without the spare descriptors of a control socket, which are closed while it runs a call."""
    return {number: path for number, path in open_files().items() if path != os.devnull}


def _check(leaks: Leaks) -> None:
    left = leaks.settle()
    if left:
        pytest.fail("left behind (and now cleaned up):\n  " + "\n  ".join(left), pytrace=False)


def _records() -> set[str]:
    try:
        return set(selection.record_paths())
    except OSError:  # none yet
        return set()


def _forget_dead(records: set[str]) -> None:
    """Remove the records of daemons that a test killed: `vfsd list` would show them in later tests."""
    for path in records:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a test's own, which are no records
            if not selection.read_record(path).alive:
                os.unlink(path)


@pytest.fixture(scope="session")
def session_dir(request: pytest.FixtureRequest) -> str:
    """This session's own directory, with a short path; gone after the session."""
    return request.config.stash[_SESSION_DIR]


@pytest.fixture(scope="session", autouse=True)
def no_leaks_of_the_session(
    request: pytest.FixtureRequest, session_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Checks what fixtures of a wider scope than one test should have ended."""
    leaks = Leaks(session_dir, [session_dir, str(tmp_path_factory.getbasetemp())])
    yield
    _check(leaks)
    # Some directories go with the object that made them, which the last test still holds.
    for item in request.session.items:
        (getattr(item, "funcargs", None) or {}).clear()
    gc.collect()
    left = sorted(os.listdir(f"{session_dir}/tmp"))
    if left:
        pytest.fail(f"temporary files left behind by some test of this session (prefixes tell whose): {left}")


@pytest.fixture(scope="session", autouse=True)
def programs_by_fork() -> Iterator[None]:
    """Fork commands and daemons of vfsd (`tests.support.zygote`); under coverage each is started, to be measured."""
    if os.environ.get("COVERAGE_PROCESS_START") or "coverage" in sys.modules:
        yield
        return
    end = zygote.install()
    yield
    end()


@pytest.fixture
def new_interpreters() -> Iterator[None]:
    """Start commands and daemons as users do, for a test of start-up itself."""
    with zygote.starting_interpreters():
        yield


@pytest.fixture(autouse=True)
def no_leaks(session_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the test after which a mount, a child process or a daemon is left.

    Set up before and torn down after the test's own fixtures; those of modules and classes come up
    earlier and may outlive the test.
    """
    leaks = Leaks(session_dir, [session_dir, str(tmp_path_factory.getbasetemp())])
    before, recorded, umask = _opened(), _records(), os.umask(0)
    os.umask(umask)
    yield
    left_umask = os.umask(umask)
    _check(leaks)
    if left_umask != umask:
        pytest.fail(f"left the umask {left_umask:03o}, which is the worker's", pytrace=False)
    _forget_dead(_records() - recorded)
    if len(_opened()) > len(before) + _FILES_LEFT:
        gc.collect()
        # Connections of a client that is gone are closed by a thread of its own.
        deadline = time.monotonic() + _FILES_CLOSE_S
        while len(_opened()) > len(before) + _FILES_LEFT and time.monotonic() < deadline:
            time.sleep(0.05)
        left = sorted(item for item in _opened().items() if item[0] not in before)
        if len(left) > _FILES_LEFT:
            pytest.fail(f"{len(left)} files left open, among them {left[:5]}")


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Let the test open as many files as the hard limit says; the soft limit of a login is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def workdir(no_leaks: None, session_dir: str) -> Path:
    """An empty directory of this test's own, its path short enough for a Unix socket in it.

    It is removed with the session, when nothing can be mounted in it any more.
    """
    return Path(tempfile.mkdtemp(dir=f"{session_dir}/work", prefix="t"))


@pytest.fixture
def root(workspace: Workspace) -> Path:
    """The mount of the folder's or module's `workspace`."""
    return Path(workspace.path)


layer = one_of(LAYERS)  # the kind of a read-only lower layer


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> functools.partial[Any]:
    """Run a coroutine function on each loop."""
    return functools.partial(anyio.run, backend=request.param)
