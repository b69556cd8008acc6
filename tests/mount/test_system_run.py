"""`vfsd run --system`: a command on an overlay of the whole machine."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click.testing
import pytest

from tests.mount.programs import VFSD, started_run, succeeded, vfsd, wait_ended
from tests.support.rights import needs_root
from tests.support.waiting import wait_until
from vfsd.cli import run as run_module
from vfsd.cli.foreground import NoPrivateMountError
from vfsd.cli.main import cli
from vfsd.machine.directories import journals_directory
from vfsd.machine.runtime import read_records, socket_dir

INNER = shlex.join(VFSD)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of the machine, which is in the overlay: /tmp is not."""
    with tempfile.TemporaryDirectory(prefix="vfsd-test-", dir="/var/tmp") as made:
        directory = Path(made)
        (directory / "file").write_text("one\n")
        yield directory
        for record in read_records():
            succeeded(vfsd("unmount", record.name, "--discard"))
        assert not os.path.exists(f"{socket_dir()}/places") or os.listdir(f"{socket_dir()}/places") == []


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return vfsd("run", "--system", *words, cwd=place, stdin=subprocess.DEVNULL)


def content(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.iterdir()}


def test_changes_anywhere_are_shown_and_discarded(place: Path) -> None:
    log = f"/var/log/{place.name}"
    script = f"echo two > file; echo new > added; pwd; (echo > {log}) 2>/dev/null; ps -e -o pid= | wc -l; exit 3"
    done = run(place, "--discard", "--", "sh", "-c", script)
    assert done.returncode == 3
    shown = done.stdout.splitlines()
    assert shown[0] == str(place)
    assert int(shown[1]) < 9, "only the processes of the run"
    assert [line.split()[0] for line in shown[2:4]] == [f"{str(place)[1:]}/added", f"{str(place)[1:]}/file"]
    assert shown[4] == " 2 paths changed, 2 insertions(+), 1 deletion(-)", "not the log"
    assert "the machine is an overlay for this command; workspace run-system holds its changes" in done.stderr
    assert "vfsd: changes there are forgotten at the end: " in done.stderr
    assert done.stderr.endswith("vfsd: discarded: 1 added, 1 modified\n")
    assert content(place) == {"file": "one\n"}
    assert not os.path.exists(log)
    assert read_records() == []


def test_what_is_kept_is_rewound_under_the_program_continued_and_applied_in_part(place: Path) -> None:
    script = f"{INNER} snapshot good; echo bad > file; {INNER} restore good; cat file; echo two > file"
    kept = run(place, "--keep", "--name", place.name, "--", "sh", "-c", script)
    assert "\none\n" in kept.stdout, kept.stderr
    refused = vfsd("exec", "-w", place.name, "--", "true")
    assert f"`vfsd run --system --name {place.name} -- COMMAND` runs one in it" in refused.stderr
    again = run(place, "--keep", "--name", place.name, "--", "sh", "-c", "cat file; echo three > third; mkdir d")
    assert again.stdout.startswith("two\n")
    below = str(place)[1:]
    succeeded(vfsd("apply", "-w", place.name, "--", f"{below}/third"))
    assert content(place) == {"file": "one\n", "third": "three\n"}
    succeeded(vfsd("unmount", place.name))  # as a restart of the machine does, it leaves the journal
    (place / "broken").write_bytes(b"\x7fELF")
    (place / "broken").chmod(0o755)
    failed = run(place, "--name", place.name, "--discard", "--", f"{place}/broken")
    assert failed.returncode in {126, 127}, failed.stderr
    rest = succeeded(vfsd("apply", "-w", place.name, "--dry-run")).splitlines()
    assert rest == [f"A {below}/d/", f"M {below}/file"], "what was kept is not discarded by a run that did not start"


def test_an_overlay_of_the_root_directory_enters_no_other_mount(place: Path, workdir: Path) -> None:
    (workdir / "m").mkdir()
    frozen = vfsd("mount", str(workdir / "m"), "--backend", "overlay:/", "--frozen")
    assert frozen.returncode != 0
    assert "--frozen is for a directory, not for the whole machine" in frozen.stderr
    succeeded(vfsd("mount", str(workdir / "m"), "--backend", "overlay:/"))
    shown = Path(f"{workdir}/m{place}")
    assert (shown / "file").read_text() == "one\n"
    assert os.listdir(workdir / "m/proc") == os.listdir(workdir / "m/dev") == os.listdir(workdir / "m/tmp") == []
    (shown / "file").write_text("two\n")
    assert succeeded(vfsd("diff", "-w", "m")) == f"M {str(place)[1:]}/file\n"


def test_a_private_tmp_is_empty_and_leads_to_the_workspace(place: Path) -> None:
    assert run(place, "--discard", "--", "sh", "-c", "ls /tmp | wc -l").stdout != "1\n"
    script = f"ls -A /tmp; touch /tmp/x; {INNER} diff; echo end"
    done = run(place, "--private-tmp", "--", "sh", "-c", script)
    assert done.stdout.count("\n") <= 2, "at most the runtime directory of this test"
    assert done.stdout.endswith("end\n"), done.stderr
    assert done.stderr.endswith("vfsd: the command changed nothing\n")


def test_what_a_command_leaves_in_the_background_ends_with_it(place: Path) -> None:
    script = "echo two > file; (setsid sh -c 'while :; do sleep 1; done' >/dev/null 2>&1 &) ; true"
    assert run(place, "--apply", "--", "sh", "-c", script).returncode == 0
    assert content(place) == {"file": "two\n"}
    assert read_records() == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--discard", "--", "sh", "-c", f"{INNER} run --system true"], "is the overlay of a system run already"),
        (["--discard", "--", "/no/such/program"], "/no/such/program"),
        (["--name", "a/b", "true"], "a/b"),
    ],
)
def test_bad_input_is_one_line(place: Path, words: list[str], expected: str) -> None:
    done = run(place, *words)
    assert done.returncode in {2, 125, 127}
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert read_records() == []


def test_without_the_right_to_mount_one_line_says_so_and_nothing_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NoPrivateMountError(1, "cannot make a namespace: Operation not permitted")

    monkeypatch.setattr(run_module, "run_in_foreground", refuse)
    monkeypatch.chdir(place)
    done = click.testing.CliRunner().invoke(cli, ["run", "--system", "--", "true"])
    assert done.exit_code == 125
    assert "needs the right to make namespaces and mounts" in done.stderr
    assert read_records() == []


@needs_root
@pytest.mark.extended
@pytest.mark.parametrize("words", [["--system"], []])
def test_a_mount_that_is_refused_leaves_nothing(place: Path, words: list[str]) -> None:
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run(
        [*without, *VFSD, "run", *words, "--", "true"], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 125
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert list(Path(journals_directory()).rglob("*")) == []


# -- signals and deaths -------------------------------------------------------------------------------
@pytest.mark.extended
def test_signals_reach_the_command_and_its_status_comes_back(place: Path) -> None:
    script = "trap 'echo got; exit 9' TERM; echo two > file; echo started; while :; do sleep 0.05; done"
    with started_run(place, script, "--system") as running:
        running.send_signal(signal.SIGTERM)
        assert running.communicate()[0].startswith("got\n")
    assert running.returncode == 9
    assert content(place) == {"file": "one\n"}
    killed = run(place, "--discard", "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL
    faulty = run(place, "--discard", "--", "sh", "-c", "kill -SEGV $$")
    assert faulty.returncode == 128 + signal.SIGSEGV


WAIT = "while [ ! -e {go} ]; do sleep 0.02 || exit 3; done"  # a program of a machine that is gone fails


@pytest.mark.extended
def test_when_vfsd_run_is_killed_its_processes_end_and_its_changes_are_kept(place: Path) -> None:
    script = "echo two > file; sleep 1000 & echo started; wait"
    with started_run(place, script, "--system") as running:
        running.kill()
        running.wait()
        assert running.communicate()[0] == "", "no process has the pipe open any more"
    shown = succeeded(vfsd("diff", "-w", "run-system"))
    assert shown == f"M {str(place)[1:]}/file\n"


@pytest.mark.extended
@pytest.mark.parametrize("with_keeper", [False, True])
def test_the_changes_survive_the_daemon(place: Path, tmp_path: Path, with_keeper: bool) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    after = "" if with_keeper else "; echo three > third"
    script = f"echo two > file; touch {started}; {WAIT.format(go=go)}{after}"
    with subprocess.Popen([*VFSD, "run", "--system", "--apply", "--", "sh", "-c", script], cwd=place) as running:
        wait_until(started.exists, "the command has made its changes")
        record = read_records()[0]
        assert record.keeper is not None
        for pid in [record.keeper, record.pid] if with_keeper else [record.pid]:
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
        go.touch()
        status = running.wait()
    if with_keeper and status != 0:  # the kernel ended the mount; the command fails when it needs it
        assert status != 125
        succeeded(vfsd("apply", "-w", "run-system"))
    assert content(place) == ({"file": "two\n"} if with_keeper else {"file": "two\n", "third": "three\n"})


@pytest.mark.extended
def test_the_command_notices_only_a_pause_when_the_daemon_is_upgraded(place: Path, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    script = f"exec 3> held; echo one >&3; touch {started}; {WAIT.format(go=go)}; echo two >&3; cat file"
    with subprocess.Popen(
        [*VFSD, "run", "--system", "--apply", "--", "sh", "-c", script], cwd=place, stdout=subprocess.PIPE, text=True
    ) as running:
        wait_until(started.exists, "the command has made its changes")
        before = read_records()[0].pid
        succeeded(vfsd("upgrade", "-w", "run-system"))
        assert read_records()[0].pid != before
        go.touch()
        printed = running.communicate()[0]
    assert running.returncode == 0
    assert printed.startswith("one\n")
    assert content(place) == {"file": "one\n", "held": "one\ntwo\n"}


@needs_root
@pytest.mark.extended
def test_roots_accidents_with_devices_and_kernel_settings_are_refused(place: Path) -> None:
    done = run(place, "--", "chmod", "700", "/dev/null", "/sys/kernel", "/proc/sys/kernel/hostname")
    assert done.stderr.count("Read-only file system") == 3
    assert stat.S_IMODE(os.stat("/dev/null").st_mode) == 0o666
