"""`vfsd run`: a command on an overlay of the current directory, and what becomes of its changes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tests.mount.programs import VFSD, failed, started_run, succeeded, vfsd, wait_ended
from tests.support.rights import needs_root
from tests.support.terminal import Shell
from tests.support.waiting import wait_until
from vfsd.cli import foreground
from vfsd.cli import run as run_module
from vfsd.cli.foreground import Ended, NoPrivateMountError, run_in_foreground
from vfsd.cli.main import cli
from vfsd.machine.directories import journals_directory
from vfsd.machine.runtime import WorkspaceRecord, read_records, socket_dir

QUESTION = r"\[a\]pply \[p\]atch \[s\]elect paths \[k\]eep \[d\]iscard \[\?\] "
SOME = "echo two > file; echo new > added"


@pytest.fixture
def project(workdir: Path) -> Iterator[Path]:
    directory = workdir / f"project-{workdir.name}"  # `vfsd run` names the workspace after it
    directory.mkdir()
    (directory / "file").write_text("one\n")
    yield directory
    for record in read_records():
        succeeded(vfsd("unmount", record.name, "--discard"))
    assert not os.path.exists(f"{socket_dir()}/places") or os.listdir(f"{socket_dir()}/places") == []


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return vfsd("run", *words, cwd=project, stdin=subprocess.DEVNULL)


def content(project: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in project.iterdir()}


@pytest.mark.extended
def test_what_a_process_in_the_background_writes_later_is_kept(project: Path, workdir: Path) -> None:
    go = workdir / "go"
    late = f"while [ ! -e {go} ]; do sleep 0.05; done; echo late > late"
    applied = run(project, "--apply", "--", "sh", "-c", f"echo two > file; ({late}) >/dev/null 2>&1 & true")
    assert applied.returncode == 1
    assert "the changes were applied, but busy: held by pid" in applied.stderr
    assert "keeps the changes" not in applied.stderr
    assert "keeps later changes" in applied.stderr
    assert content(project) == {"file": "two\n"}
    unchanged = run(project, "--", "sh", "-c", f"({late}) >/dev/null 2>&1 & true")
    assert unchanged.returncode == 125
    assert "busy: held by pid" in unchanged.stderr
    assert "keeps the changes" not in unchanged.stderr
    assert len(names()) == 2
    go.touch()
    for name in names():
        wait_until(lambda name=name: vfsd("diff", "-w", name).stdout == "A late\n", "it wrote")  # type: ignore[misc]
        wait_until(lambda name=name: vfsd("apply", "-w", name).returncode == 0, "the changes are applied")  # type: ignore[misc]
        (project / "late").unlink()


@pytest.mark.extended
def test_the_outer_of_two_runs_keeps_what_the_inner_one_is_based_on(project: Path) -> None:
    inner = f"{shlex.join(VFSD)} run --keep -- sh -c 'echo in > inner'"
    done = run(project, "--apply", "--", "sh", "-c", inner)
    assert done.returncode == 125
    assert "busy: held by pid" in done.stderr
    assert len(names()) == 2
    for name in sorted(names(), reverse=True):  # the inner one first
        succeeded(vfsd("apply", "-w", name))
        succeeded(vfsd("unmount", name))
    assert content(project) == {"file": "one\n", "inner": "in\n"}


def names() -> list[str]:
    return [record.name for record in read_records()]


def test_the_changes_are_applied_discarded_or_kept(project: Path) -> None:
    discarded = run(project, "--discard", "--", "sh", "-c", f"{SOME}; pwd; exit 3")
    assert discarded.returncode == 3
    assert discarded.stdout.startswith(f"{project}\n")
    assert " 2 paths changed, 2 insertions(+), 1 deletion(-)" in discarded.stdout
    assert discarded.stderr.endswith("vfsd: discarded: 1 added, 1 modified\n")
    assert content(project) == {"file": "one\n"}
    assert names() == []

    kept = run(project, "--", "sh", "-c", f"{SOME}; {shlex.join(VFSD)} snapshot")
    assert kept.returncode == 0
    assert names() == [f"run-{project.name}"]
    assert f"`vfsd apply -w run-{project.name}` writes them" in kept.stderr
    assert f"`vfsd apply -w run-{project.name} --dry-run` shows them" in kept.stderr
    where = succeeded(vfsd("exec", "-w", f"run-{project.name}", "--", "cat", "file"))
    assert where == "two\n", "`vfsd exec` runs on this host, too"
    shown = succeeded(vfsd("apply", "-w", f"run-{project.name}", "--dry-run"))
    assert shown.splitlines() == ["A added", "M file"], "those before the snapshot, too"
    assert content(project) == {"file": "one\n"}
    succeeded(vfsd("unmount", f"run-{project.name}", "--discard"))

    applied = run(project, "--apply", "--", "sh", "-c", SOME)
    assert applied.returncode == 0
    assert content(project) == {"file": "two\n", "added": "new\n"}
    assert names() == []


def test_paths_of_the_directory_below_are_those_of_the_kept_overlay(project: Path) -> None:
    run(project, "--keep", "--name", "kept", "--", "sh", "-c", SOME)
    succeeded(vfsd("apply", "-w", "kept", project / "added"))
    assert content(project) == {"file": "one\n", "added": "new\n"}
    assert "is not in the workspace" in failed(vfsd("apply", "-w", "kept", project.parent))
    succeeded(vfsd("unmount", "kept", "--discard"))


def test_a_command_that_changes_nothing_leaves_nothing(project: Path) -> None:
    done = run(project, "--keep", "--", "cat", "file")
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert done.stderr.endswith("vfsd: the command changed nothing\n")
    assert names() == []


def test_snapshots_of_earlier_states_are_kept_after_everything_was_applied(project: Path) -> None:
    """An apply within the run leaves no change, and named snapshots that only the workspace has."""
    line = shlex.join(VFSD)
    parts = f"{line} apply file; {line} apply added"  # no apply of everything: to the daemon the snapshots are unsaved
    kept = run(project, "--", "sh", "-c", f"{SOME}; {line} snapshot before; {parts}")
    name = f"run-{project.name}"
    assert kept.returncode == 0
    assert kept.stderr.endswith(
        f"vfsd: nothing is left to apply to {project}, but workspace {name} has 1 named snapshot\n"
        f"vfsd: workspace {name} keeps them: `vfsd snapshots -w {name}` lists them,"
        f" `vfsd unmount --discard {name}` removes it\n"
    )
    assert content(project) == {"file": "two\n", "added": "new\n"}
    succeeded(vfsd("unmount", name, "--discard"))

    (project / "added").unlink()
    done = run(project, "--apply", "--", "sh", "-c", f"{SOME}; {line} snapshot before; {line} apply added file")
    assert (done.returncode, names()) == (0, []), done.stderr
    assert done.stderr.endswith("vfsd: nothing was left to apply\n")


def test_other_programs_see_the_directory_and_no_mount(project: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text().count(f" {project} ")
    with subprocess.Popen(
        [*VFSD, "run", "--discard", "--", "sh", "-c", f"{SOME}; echo done; cat"],
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        assert running.stdout.readline() == b"done\n"
        assert content(project) == {"file": "one\n"}
        assert Path("/proc/self/mountinfo").read_text().count(f" {project} ") == before
        changes = succeeded(vfsd("diff", "-w", f"run-{project.name}"))
        assert changes.split("\n") == ["A added", "M file", ""]
        running.stdin.close()
        assert running.wait() == 0


@pytest.mark.extended
def test_paths_of_vfsd_commands_in_it_are_those_that_the_command_sees(project: Path) -> None:
    (project / "src").mkdir()
    (project / "src" / "file").write_text("one\n")
    line = shlex.join(VFSD)
    script = f"{line} snapshot s; cd src; echo two > file; {line} restore s file; cat file ../file; touch x; "
    script += f"{line} diff s -- .; {line} diff s -- {project}/src/x; {line} diff s -- /etc"
    done = run(project, "--discard", "--", "sh", "-c", f"echo root > file; {script}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[:2] == ["s", "restored s: 1 modified"]
    assert lines[2].startswith("1 file is older than what it replaced")
    assert lines[4:8] == ["one", "root", "A src/x", "A src/x"]
    assert "'/etc' is not in the workspace" in done.stderr


def test_the_document(project: Path) -> None:
    done = run(project, "--json", "--discard", "--", "sh", "-c", f"{SOME}; echo out; exit 4")
    assert done.returncode == 4
    assert json.loads(done.stdout) == {
        "directory": str(project),
        "workspace": f"run-{project.name}",
        "exit_status": 4,
        "outcome": "discarded",
        "counts": {"added": 1, "modified": 1, "removed": 0},
    }
    assert done.stderr == "out\n"


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["--", "no-such-program"], 127, "not installed, or not in $PATH; nothing was started: no-such-program"),
        (["--", "/etc/passwd"], 126, "Permission denied: /etc/passwd"),
        (["--apply", "--keep", "--", "true"], 2, "--apply and --keep exclude each other"),
        (["--private-tmp", "--", "true"], 2, "--private-tmp is for --system"),
        (["--frozen", "--system", "--", "true"], 2, "--frozen is for a directory, not for --system"),
        ([], 2, "Missing argument"),
        (["-w", "x", "--", "true"], 2, "`vfsd exec` runs a command in one"),
    ],
)
def test_a_command_that_does_not_start_leaves_nothing(
    project: Path, words: list[str], status: int, reason: str
) -> None:
    done = run(project, *words)
    assert done.returncode == status
    assert reason in done.stderr.splitlines()[-1]
    assert "is an overlay" not in done.stderr, "it was not mounted for a program that is not there"
    assert names() == []


def test_the_root_and_a_directory_with_the_runtime_directory_are_refused(project: Path) -> None:
    for directory, reason in (("/", "cannot run over the root directory"), (socket_dir(), "VFSD_RUNTIME_DIR")):
        os.makedirs(directory, exist_ok=True)
        done = vfsd("run", "--", "true", cwd=directory)
        assert done.returncode == 125
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


@needs_root  # the command leaves its mount namespace through /proc
def test_conflicts_are_reported_and_the_changes_are_kept(project: Path) -> None:
    done = run(project, "--apply", "--", "sh", "-c", f"{SOME}; echo other > /proc/{os.getpid()}/root{project}/file")
    assert done.returncode == 1
    assert f"nothing was written; workspace run-{project.name} keeps the changes" in done.stderr
    assert "vfsd: file: another program changed it below the overlay\n" in done.stderr
    assert f"`vfsd apply -w run-{project.name} --force`" in done.stderr
    assert f"`vfsd apply -w run-{project.name}`" not in done.stderr  # it would fail again
    assert content(project) == {"file": "other\n"}


@needs_root  # the command leaves its mount namespace
def test_a_repository_that_both_sides_changed_stays_in_the_workspace(project: Path) -> None:
    commit = "git add . && git -c user.name=a -c user.email=a@b commit -qm"
    subprocess.run(["sh", "-c", f"git init -q . && {commit} start"], cwd=project, check=True)
    other = f"nsenter -t {os.getpid()} -m sh -c 'cd {project} && echo other > other && {commit} other'"
    done = run(project, "--apply", "--", "sh", "-c", f"{SOME}; {commit} mine && {other}")
    name = f"run-{project.name}"
    assert done.returncode == 1
    assert f"applied except .git; workspace {name} keeps its own: `vfsd unmount --discard {name}`" in done.stderr
    assert "below the overlay" not in done.stderr  # one note for .git, not one for each of its files
    assert (project / "file").read_text() == "two\n"
    assert names() == [name]
    subjects = ["git", "log", "--all", "--format=%s"]
    assert sorted(subprocess.check_output(subjects, cwd=project, text=True).split()) == ["mine", "other", "start"]


@pytest.mark.extended
def test_a_run_in_a_run_and_in_a_workspace(project: Path, workdir: Path) -> None:
    inner = shlex.join([*VFSD, "run", "--apply", "--", "sh", "-c", SOME])
    assert run(project, "--apply", "--", "sh", "-c", inner).returncode == 0
    assert content(project) == {"file": "two\n", "added": "new\n"}
    (workdir / "ws").mkdir()
    succeeded(vfsd("mount", workdir / "ws"))
    assert run(workdir / "ws", "--apply", "--", "sh", "-c", SOME).returncode == 0
    assert content(workdir / "ws") == {"file": "two\n", "added": "new\n"}


def test_a_killed_run_loses_nothing(project: Path) -> None:
    with subprocess.Popen(
        [*VFSD, "run", "--discard", "--", "sh", "-c", f"{SOME}; echo $$; read line; echo three > file"],
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        command = int(running.stdout.readline())
        running.kill()
        running.wait()
        running.stdin.close()
        wait_ended(command)
    assert names() == [f"run-{project.name}"]
    assert "+three" in succeeded(vfsd("diff", "-w", f"run-{project.name}", "--patch"))


@pytest.mark.parametrize("flags", [[], ["--apply"]])
def test_sigterm_goes_to_the_command_and_the_changes_are_kept(project: Path, flags: list[str]) -> None:
    script = f"trap 'echo got; exit 9' TERM; {SOME}; echo started; while :; do sleep 0.05; done"
    with started_run(project, script, *flags, stderr=subprocess.PIPE) as running:
        running.send_signal(signal.SIGTERM)
        printed, remarks = running.communicate()
    assert running.returncode == 9
    assert printed.startswith("got\n")
    assert "keeps the changes" in remarks
    assert content(project) == {"file": "one\n"}


KILL_THE_DAEMON = f"kill -9 $({shlex.join(VFSD)} list | cut -f5)"


def journals() -> list[str]:
    """The files of all journals."""
    return [str(path) for path in Path(journals_directory()).rglob("*")]


def kill(record: WorkspaceRecord) -> None:
    """Kill the daemon, and its keeper first."""
    assert record.keeper is not None
    for pid in (record.keeper, record.pid):
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)


def test_without_a_journal_a_dead_daemon_is_reported(project: Path) -> None:
    done = run(project, "--no-persist", "--apply", "--", "sh", "-c", f"{SOME}; {KILL_THE_DAEMON}; sleep 0.1")
    assert done.returncode == 125
    assert done.stderr.endswith(f"the daemon of run-{project.name} died: the changes of the command are lost\n")
    assert content(project) == {"file": "one\n"}
    assert names() == []


def test_the_changes_survive_the_daemon(project: Path) -> None:
    done = run(project, "--apply", "--", "sh", "-c", f"{SOME}; {KILL_THE_DAEMON}; echo three > third")
    assert done.returncode == 0, done.stderr
    assert content(project) == {"file": "two\n", "added": "new\n", "third": "three\n"}
    assert journals() == []


@pytest.mark.parametrize("choice", ["--apply", "--discard", "--keep"])
def test_the_changes_survive_the_daemon_and_its_keeper(project: Path, choice: str, workdir: Path) -> None:
    go, started = workdir / "go", workdir / "started"
    script = f"{SOME}; touch {started}; while [ ! -e {go} ]; do sleep 0.02; done"
    with subprocess.Popen([*VFSD, "run", choice, "--", "sh", "-c", script], cwd=project) as running:
        wait_until(started.exists, "the command has made its changes")
        kill(read_records()[0])
        go.touch()
        assert running.wait() == 0
    if choice == "--keep":
        assert succeeded(vfsd("apply", "-w", f"run-{project.name}")) == f"applied to {project}: 1 added, 1 modified\n"
        succeeded(vfsd("unmount", f"run-{project.name}"))
    assert content(project) == ({"file": "one\n"} if choice == "--discard" else {"file": "two\n", "added": "new\n"})
    assert journals() == []


def test_what_is_kept_is_in_a_journal_until_it_is_discarded(project: Path) -> None:
    kept = run(project, "--keep", "--", "sh", "-c", SOME)
    assert "its journal takes" in kept.stderr
    listed = vfsd("persisted", "list")
    assert listed.stdout.startswith(f"run-{project.name}\tin use\t")
    assert "`vfsd unmount --discard NAME`" in listed.stderr
    status = succeeded(vfsd("status", "-w", f"run-{project.name}"))
    assert "\nall journals\t" in status
    assert "\nto free them\t`vfsd persisted list`" in status
    (record,) = read_records()
    assert record.journal is not None
    forked = vfsd("fork", "-w", f"run-{project.name}", project.parent / "fork")
    assert "the fork has neither a journal nor a keeper" in forked.stderr
    succeeded(vfsd("unmount", "fork"))
    succeeded(vfsd("unmount", f"run-{project.name}"))  # with a journal it loses nothing
    assert (
        f"`vfsd persisted drop run-{project.name}` removes it"
        in vfsd("unmount", f"run-{project.name}", "--discard").stderr
    )
    run(project, "--keep", "--", "sh", "-c", "cat file > copy")
    assert names() == [f"run-{project.name}-2"], "a new run does not continue the journal of an earlier one"
    assert succeeded(vfsd("unmount", f"run-{project.name}-2", "--discard")).startswith(
        f"unmounted run-{project.name}-2 "
    )
    succeeded(vfsd(*shlex.split(record.continuing(record.journal))[1:]))
    assert (Path(record.mountpoint) / "added").read_text() == "new\n"
    kill(read_records()[0])
    done = vfsd("unmount", f"run-{project.name}", "--discard")
    assert done.returncode == 0, done.stderr
    assert "kept" not in done.stderr
    assert journals() == []


def test_without_a_place_for_the_journal_one_line_says_so(project: Path, workdir: Path) -> None:
    (workdir / "file").touch()
    environment = {**os.environ, "XDG_STATE_HOME": str(workdir / "file")}
    command = ["run", "--apply", "--", "sh", "-c", SOME]
    done = vfsd(*command, cwd=project, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stderr
    warning = done.stderr.splitlines()[0]
    assert warning.startswith(f"vfsd: the journal cannot be written in {workdir}/file/vfsd/journals (Not a directory)")
    assert content(project) == {"file": "two\n", "added": "new\n"}


@needs_root
def test_changes_are_applied_also_when_the_disk_of_the_journal_is_full(project: Path, workdir: Path) -> None:
    state = workdir / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", state], check=True)
    try:
        environment = {**os.environ, "XDG_STATE_HOME": str(state)}
        sizes = "for size in 4M 64K 32K 16K 8K 4K 2K 1K; do head -c $size /dev/zero > $size; done"
        fill = f"{{ {sizes}; while : > $((i += 1)); do :; done; }} 2> /dev/null; true"  # the disk of the journal
        done = vfsd("run", "--apply", "--", "bash", "-c", fill, cwd=project, stdin=subprocess.DEVNULL, env=environment)
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in project.iterdir()) == sorted(
            ["file", *["4M", "64K", "32K", "16K", "8K", "4K", "2K", "1K"]]
        )
    finally:
        subprocess.run(["umount", "-l", state], check=True)


@needs_root
def test_changes_that_cannot_be_applied_are_kept(workdir: Path) -> None:
    project = workdir / f"project-{workdir.name}"
    project.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", project], check=True)
    try:
        done = vfsd(
            "run", "--apply", "--", "sh", "-c", "head -c 1M /dev/urandom > large", cwd=project, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 1, done.stderr
        assert "No space left on device" in done.stderr
        assert f"workspace run-{project.name} keeps the changes" in done.stderr
        assert content(project) == {}
        assert succeeded(vfsd("diff", "-w", f"run-{project.name}")) == "A large\n"
        succeeded(vfsd("unmount", f"run-{project.name}", "--discard"))
    finally:
        subprocess.run(["umount", "-l", project], check=True)


def test_files_that_become_older_are_counted_and_touched_on_request(project: Path) -> None:
    os.utime(project / "file", (2_000_000_000, 2_000_000_000))
    command = ("sh", "-c", "echo two > file; touch -d @1000000000 file")
    done = run(project, "--apply", "--", *command)
    assert "1 file is older than what it replaced; build tools may not notice: touch it, or pass" in done.stderr
    assert (project / "file").stat().st_mtime == 1_000_000_000
    done = run(project, "--apply", "--touch", "--", "sh", "-c", "echo three > file; touch -d @900000000 file")
    assert (done.returncode, "older" in done.stderr) == (0, False)
    assert (project / "file").stat().st_mtime > 1_000_000_000
    assert run(project, "--keep", "--touch", "--", "true").returncode == 2


def test_a_command_that_failed_is_not_applied(project: Path) -> None:
    done = run(project, "--apply", "--", "sh", "-c", f"{SOME}; exit 3")
    assert done.returncode == 3
    assert "the command failed with status 3, so its changes are not applied" in done.stderr
    assert f"`vfsd apply -w run-{project.name}` writes them" in done.stderr
    assert content(project) == {"file": "one\n"}
    in_shell = run(project, "--apply", "--", "sh", "-c", f"{SOME}; sh -c 'kill -9 $$'; exit $?")
    assert "the command failed with status 137 (as if killed by SIGKILL)" in in_shell.stderr
    killed = run(project, "--apply", "--", "sh", "-c", f"{SOME}; kill -9 $$")
    assert (killed.returncode, "the command was killed by SIGKILL, so its" in killed.stderr) == (137, True)
    killed = run(project, "--apply", "--json", "--", "sh", "-c", f"{SOME}; kill -9 $$")
    assert (killed.returncode, json.loads(killed.stdout)["outcome"]) == (137, "kept")
    assert content(project) == {"file": "one\n"}


def test_without_a_private_mount_the_command_runs_at_another_path(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str] = []

    def refused(command: object, source: str, target: str | None, environment: object, **fd: int) -> Ended:
        if target is not None:
            raise NoPrivateMountError(1, "cannot make a namespace: Operation not permitted")
        places.append(source)
        return run_in_foreground(command, source, target, environment, **fd)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "run_in_foreground", refused)
    monkeypatch.chdir(project)
    done = click.testing.CliRunner().invoke(cli, ["run", "--apply", "--", "sh", "-c", SOME])
    assert done.exit_code == 0, done.output
    assert f"Operation not permitted; the command runs in {places[0]} instead" in done.stderr
    assert content(project) == {"file": "two\n", "added": "new\n"}


def test_ctrl_c_while_the_command_starts_prints_no_traceback(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        return popen(*arguments, preexec_fn=started, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(foreground.subprocess, "Popen", interrupted)
    ended = run_in_foreground(["echo", "ran"], str(workdir), None, os.environ)
    assert (ended.status, ended.failure) == (130, "was killed by SIGINT")
    assert capfd.readouterr() == ("", "")


def test_a_directory_whose_name_is_no_text(project: Path) -> None:
    odd = os.fsencode(project) + b"/a b\n\xff"
    os.mkdir(odd)
    done = vfsd("run", "--apply", "--", "sh", "-c", SOME, cwd=odd)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(odd)) == [b"added", b"file"]
    assert done.stderr.splitlines()[-1].endswith("/a b\\x0a\\xff: 2 added")
    subprocess.run(["rm", "-r", odd], check=True)


def test_the_choice_counts_even_if_nothing_reads_the_output(project: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*VFSD, "run", "--apply", "--", "sh", "-c", SOME]
    done = subprocess.run(command, cwd=project, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert "applied to" in done.stderr
    assert content(project) == {"file": "two\n", "added": "new\n"}


# -- on a terminal ----------------------------------------------------------------------------------
@pytest.fixture
def shell(project: Path, request: pytest.FixtureRequest) -> Iterator[Shell]:
    """A shell with the command `run`; a parameter is the words of it."""
    words = getattr(request, "param", "run")
    with Shell(cwd=project) as started:
        started.run(f'run() {{ {shlex.join(VFSD)} {words} "$@"; }}')
        started.expect("ready> ")
        yield started


@pytest.mark.extended
def test_a_terminal_is_asked(shell: Shell, project: Path) -> None:
    shell.run(f"run -- sh -c '{SOME}'")
    shell.expect(QUESTION)
    shell.type("?\n")
    shell.expect(f"  a  apply    write the changes to {project}, and end the workspace\n")
    shell.expect(QUESTION)
    shell.type("a\n")
    shell.expect("applied to .*: 1 added, 1 modified")
    assert shell.status() == 0
    assert content(project) == {"file": "two\n", "added": "new\n"}


def test_the_patch_is_shown_and_selected_paths_are_applied_before_the_rest_is_discarded(
    shell: Shell, project: Path
) -> None:
    (project / ".gitignore").write_text("build/\n")
    shell.run(f"run -- sh -c '{SOME}; mkdir build; echo object > build/1; echo object > build/2'")
    shell.expect(r" build/ +\| 2 new, ignored\n")
    shell.expect(QUESTION)
    shell.type("p\n")
    patch = shell.expect(rf"(?s)diff --git .*{QUESTION}")[0]
    assert "+two" in patch
    assert "object" not in patch
    shell.type("s\n")
    shell.expect("    1  added\n    2  file\n    3  build\n")
    shell.type("9\n")
    shell.expect("9 is neither one of the paths nor a number from 1 to 3")
    shell.type("file\n")
    shell.expect("applied to .*: 1 modified")
    assert content(project) == {"file": "two\n", ".gitignore": "build/\n"}
    shell.expect(QUESTION)
    shell.type("d\n")
    shell.expect("discarded: 4 added")
    assert shell.status() == 0
    assert names() == []


def test_who_leaves_the_pager_early_is_asked_all_the_same_and_sees_the_patch(shell: Shell, project: Path) -> None:
    many = "for number in $(seq 900); do echo $number > $number-$(printf %0200d 0); done"  # more than a pipe holds
    shell.run(f"TERM=xterm NO_COLOR=1 VFSD_PAGER='head -n 1' run -- sh -c '{many}'")
    shell.expect(QUESTION)
    shell.type("p\n")
    shell.expect("diff --git")
    shell.expect(QUESTION)
    shell.type("d\n")
    shell.expect("discarded: 900 added")
    assert shell.status() == 0


@pytest.mark.extended
def test_the_directory_itself_is_not_among_the_paths_to_select(shell: Shell, project: Path) -> None:
    shell.run(f"run -- sh -c '{SOME}; chmod 700 .'")
    shell.expect(QUESTION)
    shell.type("s\n")
    shell.expect("    1  added\n    2  file\n")
    shell.type("1,\n")
    shell.expect("applied to .*: 1 added\n")
    shell.expect(QUESTION)
    shell.type("d\n")
    shell.expect("discarded: 2 modified")
    shell.expect("ready> ")
    assert content(project) == {"file": "one\n", "added": "new\n"}


@pytest.mark.extended
def test_when_all_paths_were_selected_nothing_is_left_to_ask(shell: Shell, project: Path) -> None:
    shell.run(f"run -- sh -c '{SOME}'")
    shell.expect(QUESTION)
    shell.type("s\n")
    shell.expect("none with Enter: ")
    shell.type("1-2\n")
    shell.expect("applied to .*: 1 added, 1 modified")
    assert shell.status() == 0
    assert content(project) == {"file": "two\n", "added": "new\n"}
    assert names() == []


@pytest.mark.extended
@pytest.mark.parametrize("key", ["\x03", "\x04", "k\n"])
def test_ctrl_c_and_the_end_of_the_input_keep_the_changes(shell: Shell, project: Path, key: str) -> None:
    shell.run(f"run -- sh -c '{SOME}'")
    shell.expect(QUESTION)
    shell.type(key)
    shell.expect("keeps the changes")
    assert shell.status() == 0
    assert names() == [f"run-{project.name}"]


@pytest.mark.extended
def test_ctrl_c_is_for_the_command(shell: Shell) -> None:
    shell.run(
        f"run --discard -- sh -c 'trap \"echo caught; exit 7\" INT; {SOME}; echo start; while :; do sleep 1; done'"
    )
    shell.expect("start\n")
    shell.type("\x03")
    shell.expect("caught\n")
    shell.expect("discarded: 1 added, 1 modified")
    assert shell.status() == 7


EACH = pytest.mark.parametrize("shell", ["run", "run --system"], indirect=True)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("shell", "key", "status"), [("run", "\x04", 0), ("run --system", "\x03", 128 + signal.SIGINT)], indirect=["shell"]
)
def test_ctrl_z_and_fg(shell: Shell, key: str, status: int) -> None:
    shell.run("run --keep -- sh -c 'echo start; exec cat'")
    shell.expect("start\n")
    shell.type("first\n")
    shell.expect("first\nfirst\n")
    shell.type("\x1a")
    shell.expect(r"Stopped")
    assert shell.status() == 128 + signal.SIGSTOP
    shell.run("fg")
    shell.expect('run( --system)? "[$]@"\n')  # bash shows the command that continues
    shell.type("second\n")
    shell.expect("second\nsecond\n")
    shell.type(key)
    shell.expect("the command changed nothing")
    assert shell.status() == status


@pytest.mark.extended
@EACH
def test_a_program_that_stops_itself_gives_the_terminal_back(shell: Shell) -> None:
    shell.run("run --keep -- sh -c 'kill -STOP $$; echo resumed; exit 5'")
    shell.expect(r"Stopped")
    shell.status()
    shell.run("fg")
    shell.expect("resumed\n")
    assert shell.status() == 5


@pytest.mark.extended
def test_a_killed_program_leaves_the_terminal_usable(shell: Shell) -> None:
    shell.run("run --keep -- sh -c 'stty raw -echo; kill -9 $$'")
    shell.expect("the command changed nothing")
    assert shell.status() == 128 + signal.SIGKILL
    shell.run("stty -a | tr ' ' '\\n' | grep -x -e icanon -e -icanon")
    shell.expect("(?m)^icanon$")


@pytest.mark.extended
@EACH
def test_an_interactive_shell_in_it_has_job_control(shell: Shell) -> None:
    shell.run("run --keep -- env HISTFILE= PS1='inner> ' bash --norc --noprofile --noediting -i")
    shell.expect("inner> ")
    shell.run("sh -c 'echo start; exec cat'")
    shell.expect("start\n")
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.expect("inner> ")
    shell.run("fg")
    shell.expect("exec cat'\n")  # bash shows the command that continues
    shell.type("\x04")
    shell.expect("inner> ")
    shell.run("exit 6")
    shell.expect("the command changed nothing")
    assert shell.status() == 6
