"""The doctor: on this machine, and on machines that lack one thing each."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.journal.directory import Journal
from tests.support.rights import needs_root
from vfsd.machine import doctor, mountinfo, mounts
from vfsd.machine.doctor import Finding, Host, LeftContainer, examine, repair_command
from vfsd.machine.mountinfo import vfsd_mounts
from vfsd.machine.runtime import WorkspaceRecord, ensure_socket_dir, process_start_ticks, write_record

TINY_FUSE = Path(__file__).with_name("tiny_fuse.py")


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(path))
    # The doctor opens every mount, which keeps those of the other workers' tests busy.
    own = str(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(doctor, "vfsd_mounts", lambda: [m for m in vfsd_mounts() if m.mountpoint.startswith(own)])
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a machine with everything a user needs, in files."""
    for name, content in {
        "dev/fuse": "",
        "etc/mtab": "",
        "etc/fuse.conf": "# user_allow_other is explained here\nuser_allow_other\n",
        "proc/self/status": "Name:\tx\nNoNewPrivs:\t0\n",
        "proc/self/cgroup": "0::/unit\n",
        "sys/fs/cgroup/unit/pids.max": "1000\n",
        "sys/fs/cgroup/unit/pids.current": "10\n",
        "proc/sys/fs/fuse/default_request_timeout": "0\n",
        "bin/fusermount3": "",
        "bin/podman": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "bin/podman").chmod(0o755)
    (tmp_path / "bin/fusermount3").chmod(0o4755)
    return tmp_path


def as_user(machine: Path, release: str = "6.8.0-test", uid: int = 1000) -> Host:
    environ = {"PATH": str(machine / "bin"), "XDG_RUNTIME_DIR": str(machine)}
    return Host(
        root=str(machine),
        release=release,
        uid=uid,
        environ=environ,
        left_containers=lambda _url: [],
        user_namespace_errno=lambda: 0,
    )


def setting(machine: Path, name: str, value: str) -> None:
    path = machine / "proc/sys" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def found(topic: str, host: Host) -> Finding:
    return next(finding for finding in examine(host=host) if finding.topic == topic)


def topics(host: Host) -> set[str]:
    return {finding.topic for finding in examine(host=host)}


@needs_root  # whose fusermount3 is
def test_a_machine_with_everything_lacks_nothing_that_is_needed(machine: Path) -> None:
    assert [finding for finding in examine(host=as_user(machine)) if not finding.ok and not finding.optional] == []


def test_every_finding_that_is_not_ok_says_what_to_do(machine: Path) -> None:
    (machine / "etc/fuse.conf").unlink()
    (machine / "bin/podman").unlink()
    (machine / "bin/fusermount3").unlink()
    (machine / "dev/fuse").unlink()
    missing = [finding for finding in examine(host=as_user(machine, "4.4.0")) if not finding.ok]
    assert {"kernel", "/dev/fuse", "fusermount3", "user_allow_other", "podman"} <= {f.topic for f in missing}
    assert all(finding.advice for finding in missing)


Change = Callable[[Path], object]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("topic", "change", "what", "advice", "optional"),
    [
        ("/dev/fuse", lambda m: (m / "dev/fuse").unlink(), "missing", "modprobe fuse", False),
        ("fusermount3", lambda m: (m / "bin/fusermount3").unlink(), "missing", "apt install fuse3", False),
        ("fusermount3", lambda m: (m / "bin/fusermount3").chmod(0o755), "not setuid", "chmod 4755", False),
        (
            "fusermount3",
            lambda m: (m / "proc/self/status").write_text("NoNewPrivs:\t1\n"),
            "NoNewPrivs",
            "NoNewPrivileges=no",
            False,
        ),
        (
            "user_allow_other",
            lambda m: (m / "etc/fuse.conf").write_text("#user_allow_other\n"),
            "not set",
            "tee -a /etc/fuse.conf",
            True,
        ),
        ("fuse mounts", lambda m: (m / "etc/fuse.conf").write_text("mount_max = 0\n"), "of 0", "mount_max", False),
        (
            "processes",
            lambda m: (m / "sys/fs/cgroup/unit/pids.current").write_text("999\n"),
            "1 more of 1000",
            "TasksMax=",
            True,
        ),
        (
            "request timeout",
            lambda m: (m / "proc/sys/fs/fuse/default_request_timeout").write_text("5\n"),
            "5 s",
            "sysctl fs.fuse",
            True,
        ),
        ("podman", lambda m: (m / "bin/podman").unlink(), "missing", "dnf install podman", True),
        (
            "user namespaces",
            lambda m: setting(m, "kernel/apparmor_restrict_unprivileged_userns", "1"),
            "AppArmor restricts user namespaces (Ubuntu's default): the command of `vfsd run` sees",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            True,
        ),
        (
            "fusermount3",
            lambda m: (m / "etc/mtab").unlink(),
            "users cannot unmount",
            "sudo ln -s /proc/self/mounts /etc/mtab",
            False,
        ),
        (
            "user namespaces",
            lambda m: setting(m, "user/max_user_namespaces", "0"),
            "refuses user namespaces",
            "sudo sysctl user.max_user_namespaces=10000",
            True,
        ),
    ],
)
def test_what_is_missing_is_found(
    machine: Path, topic: str, change: Change, what: str, advice: str, optional: bool
) -> None:
    before = found(topic, as_user(machine))
    assert before.ok
    change(machine)
    after = found(topic, as_user(machine))
    assert not after.ok
    assert what in after.what
    assert advice in after.advice
    assert after.optional is optional


def test_one_command_repairs_what_is_missing(machine: Path) -> None:
    assert repair_command(examine(host=as_user(machine))) == ""
    (machine / "dev/fuse").unlink()
    (machine / "bin/fusermount3").unlink()
    for manager in ("apt-get", "podman"):
        (machine / "bin" / manager).touch(0o755)
    assert repair_command(examine(host=as_user(machine))) == "sudo modprobe fuse && sudo apt-get install -y fuse3"
    assert repair_command(examine(host=as_user(machine, uid=0))) == "modprobe fuse"
    (machine / "run").mkdir()
    (machine / "run/.containerenv").touch()  # in a container nothing loads modules
    assert repair_command(examine(host=as_user(machine))) == "sudo apt-get install -y fuse3"
    assert "--device /dev/fuse" in found("/dev/fuse", as_user(machine)).advice


def test_a_user_namespace_that_the_kernel_refuses_for_another_reason_is_found(machine: Path) -> None:
    host = dataclasses.replace(as_user(machine), user_namespace_errno=lambda: errno.EPERM)
    assert "refused (Operation not permitted): the command of `vfsd run`" in found("user namespaces", host).what
    assert "user namespaces" not in topics(dataclasses.replace(host, uid=0))


def test_root_needs_neither_a_setuid_fusermount3_nor_user_allow_other(machine: Path) -> None:
    (machine / "bin/fusermount3").chmod(0o755)
    (machine / "etc/fuse.conf").unlink()
    assert found("fusermount3", as_user(machine, uid=0)).ok
    (machine / "bin/fusermount3").unlink()
    assert found("fusermount3", as_user(machine, uid=0)).ok
    assert found("user_allow_other", as_user(machine, uid=0)).ok


@pytest.mark.parametrize(
    ("release", "ok"), [("5.3.18", False), ("5.4.0-generic", True), ("5.15.0", True), ("10.0", True)]
)
def test_old_kernels_are_refused(machine: Path, release: str, ok: bool) -> None:
    assert found("kernel", as_user(machine, release)).ok is ok


def no_module(name: str) -> str:
    raise ImportError(f"No module named {name!r}")


@needs_root
def test_without_pyfuse3_nothing_that_is_needed_is_missing_where_the_native_engine_works(machine: Path) -> None:
    host = dataclasses.replace(as_user(machine, "5.15.0"), module_version=no_module)
    assert [finding.topic for finding in examine(host=host) if not finding.ok and not finding.optional] == []
    pyfuse3 = found("pyfuse3", host)
    assert (pyfuse3.ok, pyfuse3.optional) == (False, True)
    assert "native" in pyfuse3.what
    assert "[pyfuse3]" in pyfuse3.advice


def test_a_kernel_too_old_for_the_native_engine_needs_pyfuse3(machine: Path) -> None:
    assert "5.15" in found("kernel", as_user(machine, "5.10.0")).what
    host = dataclasses.replace(as_user(machine, "5.10.0"), module_version=no_module)
    for topic in ("kernel", "pyfuse3"):
        assert (found(topic, host).ok, found(topic, host).optional) == (False, False)
    assert "5.15" in found("kernel", as_user(machine, "5.3.0")).what


LIMITED = "Name:\tx\nNoNewPrivs:\t0\nCapEff:\t000001fffeffffff\n"


def test_limits_that_stop_podmans_containers_are_found(machine: Path) -> None:
    (machine / "proc/self/status").write_text(LIMITED)
    root = dataclasses.replace(as_user(machine, uid=0), open_files_hard=20000)
    finding = found("podman limits", root)
    assert (finding.ok, finding.optional) == (False, True)
    assert "nofile=20000:20000" in finding.advice
    for other in (
        dataclasses.replace(root, open_files_hard=1048576),
        dataclasses.replace(root, open_files_hard=resource.RLIM_INFINITY),
        dataclasses.replace(root, uid=1000),  # Podman lowers its defaults for users itself
    ):
        assert "podman limits" not in topics(other)
    (machine / "etc/containers").mkdir()
    (machine / "etc/containers/containers.conf").write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024"]\n')
    assert "podman limits" not in topics(root)


def test_limits_that_podman_may_raise_are_no_trouble(machine: Path) -> None:
    (machine / "proc/self/status").write_text(LIMITED.replace("fffeffffff", "ffffffffff"))
    assert "podman limits" not in topics(dataclasses.replace(as_user(machine, uid=0), open_files_hard=20000))


def test_another_distribution_with_a_package_of_the_same_name_is_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "protocol" not in topics(as_user(machine))
    assert found("installation", as_user(machine)).ok
    owners = {"protocol": ["protocol", "vfsd"], "vfsd": ["vfsd"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: owners)
    finding = found("protocol", as_user(machine))
    assert (finding.ok, finding.optional) == (False, False)
    assert "of the distribution protocol" in finding.what
    assert "uninstall it" in finding.advice


@pytest.mark.extended
@pytest.mark.parametrize("words", [["doctor"], ["status"], ["mount", "x", "--json"]])
def test_a_package_of_the_same_name_that_hides_vfsds_is_one_line(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "protocol").mkdir()
    (tmp_path / "protocol/__init__.py").touch()
    places = [tmp_path, Path(__file__).parents[4], sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    # -S: without the hooks of an editable installation, by which vfsd's modules are found all the same.
    command = [sys.executable, "-S", "-P", "-m", "vfsd.cli.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/protocol is in the way of vfsd's: uninstall it" in done.stderr
    assert done.stderr.count("\n") == 1
    command = [sys.executable, "-S", "-P", "-c", "import vfsd; vfsd.Workspace"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: the package `protocol` in")


def test_what_a_later_kernel_would_give_is_optional(machine: Path) -> None:
    features = found("kernel features", as_user(machine, "5.10.0"))
    assert (features.ok, features.optional) == (False, True)
    assert "O_TMPFILE" in features.what
    assert "kernel features" not in topics(as_user(machine, "6.2.0"))


def test_the_podman_socket_is_connected_to(machine: Path) -> None:
    assert "systemctl --user" in found("podman socket", as_user(machine)).advice
    (machine / "podman").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(machine / "podman/podman.sock"))
        server.listen(1)
        assert found("podman socket", as_user(machine)).ok
    assert not found("podman socket", as_user(machine)).ok  # the file is there, nobody listens


@pytest.mark.parametrize(
    ("url", "ok", "what"),
    [
        ("ssh://me@there/run/podman.sock", True, "not tried"),
        ("tcp://there:8080", True, "not tried"),
        ("nonsense", False, "not the address"),
    ],
)
def test_a_podman_of_another_machine_is_named_and_nonsense_is_told(
    machine: Path, url: str, ok: bool, what: str
) -> None:
    host = as_user(machine)
    host.environ["CONTAINER_HOST"] = url

    finding = found("podman socket", host)

    assert (finding.ok, finding.optional) == (ok, True)
    assert what in finding.what


def test_containers_with_files_of_dead_workspaces_are_listed(machine: Path) -> None:
    (machine / "podman").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(machine / "podman/podman.sock"))
        server.listen()
        host = dataclasses.replace(as_user(machine), left_containers=lambda _url: [LeftContainer("vfsd-w-12ab", "w")])
        finding = found("containers", host)
        assert "vfsd-w-12ab has the files of the workspace w" in finding.what
        assert "podman rm --force --volumes vfsd-w-12ab" in finding.advice
        assert finding.optional


def test_a_podman_without_a_runtime_is_found(machine: Path) -> None:
    assert "crun" in found("container runtime", as_user(machine)).advice
    (machine / "bin/runc").touch(0o755)
    assert "container runtime" not in topics(as_user(machine))


@needs_root
def test_a_runtime_directory_that_is_a_strangers_is_found(machine: Path, runtime: Path) -> None:
    (runtime / "vfsd").mkdir()
    os.chown(runtime / "vfsd", 65534, 65534)
    finding = found("runtime directory", as_user(machine))
    assert (finding.ok, finding.optional) == (False, False)
    assert "VFSD_RUNTIME_DIR" in finding.advice


def test_a_runtime_directory_too_long_for_a_socket_is_found(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    finding = found("runtime directory", as_user(machine))
    assert not finding.ok
    assert "shorter" in finding.advice


def test_sockets_and_records_of_the_dead_are_found_and_the_advice_removes_them(machine: Path, runtime: Path) -> None:
    assert "dead socket" not in topics(as_user(machine))
    (runtime / "vfsd").mkdir(mode=0o700, exist_ok=True)
    (runtime / "vfsd" / "gone.sock").touch()
    finding = found("dead socket", as_user(machine))
    assert "'gone'" in finding.what
    subprocess.run(["sh", "-c", finding.advice], check=True)
    assert "dead socket" not in topics(as_user(machine))


def write_dead_record(name: str, mountpoint: Path, journal: Path | None) -> None:
    ensure_socket_dir()
    write_record(
        WorkspaceRecord(
            name=name, mountpoint=str(mountpoint), pid=os.getpid(), pid_start_ticks=-1, backend="memory",
            started_at="", version="", socket="/s", journal=None if journal is None else str(journal),
        )
    )  # fmt: skip


def test_the_record_of_the_dead_is_not_to_be_removed_by_hand_because_it_names_the_journal(
    machine: Path, runtime: Path, tmp_path: Path
) -> None:
    write_dead_record("gone", tmp_path / "place", tmp_path / "journal")
    (runtime / "vfsd" / "gone.sock").touch()
    advice = found("dead socket", as_user(machine)).advice
    assert advice.startswith("vfsd unmount gone; or ")
    assert f"vfsd mount {tmp_path}/place --persist --name gone --journal-dir {tmp_path}/journal" in advice
    assert "rm " not in advice


@pytest.mark.parametrize(
    ("is_alive", "changes", "what", "advice"),
    [
        (True, {}, "restart a daemon that dies: kept: process", ""),
        (
            True,
            {"lost_keeper": ("the command runs again", "mount it again")},
            "the command runs again",
            "mount it again",
        ),
        (True, {"keeper": -1}, "the keeper of kept died", "mount it again"),
        (False, {"keeper": -1, "failure": "its journal was moved"}, "is dead: its journal was moved", "mount it again"),
        (
            False,
            {"keeper": -1, "failure": "its disk is full", "journal": "/j"},
            "is dead: its disk is full",
            "mount it again: vfsd mount /m --persist --name kept --journal-dir /j",
        ),
    ],
    ids=["kept", "lost", "died", "failed", "journal"],
)
def test_what_restarts_a_daemon_is_said_as_its_record_has_it(
    machine: Path, is_alive: bool, changes: dict[str, Any], what: str, advice: str
) -> None:
    ensure_socket_dir()
    own, ticks = os.getpid(), process_start_ticks(os.getpid()) or 0
    alive = {"pid": own, "pid_start_ticks": ticks, "keeper": own, "keeper_start_ticks": ticks}
    dead = {} if is_alive else {"pid_start_ticks": -1}
    write_record(
        WorkspaceRecord(
            name="kept", mountpoint="/m", backend="memory", started_at="", version="", socket="/s",
            **{**alive, **dead, **changes},
        )
    )  # fmt: skip
    finding = found("keepers", as_user(machine))
    assert what in finding.what
    assert advice in finding.advice
    assert finding.ok == (not changes)


@pytest.fixture
def dead_mount(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "a place"
    place.mkdir()
    command = [sys.executable, str(TINY_FUSE), str(place), "lost"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        daemon.kill()
    yield place
    if mountinfo.mount_at(str(place)) is not None:
        mounts.clear_dead_mount(str(place))


@pytest.mark.fuse
def test_a_dead_mount_is_found_and_the_advice_clears_it(machine: Path, dead_mount: Path) -> None:
    dead = [f for f in examine(host=as_user(machine)) if f.topic == "dead mount" and str(dead_mount) in f.what]
    assert len(dead) == 1
    assert "workspace 'lost'" in dead[0].what
    subprocess.run(["sh", "-c", dead[0].advice.split(";")[0]], check=True)
    assert mountinfo.mount_at(str(dead_mount)) is None


@pytest.mark.fuse
def test_a_dead_mount_with_a_journal_is_mounted_again_from_that_journal(
    machine: Path, dead_mount: Path, tmp_path: Path
) -> None:
    write_dead_record("lost", dead_mount, tmp_path / "journal")
    findings = examine(host=as_user(machine))
    dead = [f for f in findings if f.topic == "dead mount" and str(dead_mount) in f.what]
    assert len(dead) == 1
    assert dead[0].advice == (
        f"vfsd unmount lost; or mount it again: vfsd mount '{dead_mount}' --persist --name lost "
        f"--journal-dir {tmp_path}/journal"
    )
    assert "dead socket" not in {finding.topic for finding in findings}


@pytest.mark.fuse
def test_a_dead_mount_of_another_workspace_with_the_same_name_is_not_unmounted_by_name(
    machine: Path, dead_mount: Path, tmp_path: Path
) -> None:
    write_dead_record("lost", tmp_path / "elsewhere", None)
    dead = [f for f in examine(host=as_user(machine)) if f.topic == "dead mount" and str(dead_mount) in f.what]
    assert len(dead) == 1
    assert "vfsd unmount" not in dead[0].advice


@pytest.mark.fuse
def test_deep_makes_a_mount_and_leaves_nothing() -> None:
    finding = next(finding for finding in examine(deep=True) if finding.topic == "mount")
    assert finding.ok, finding.what
    assert "doctor" not in {mount.workspace for mount in mountinfo.mounts()}


def test_a_check_that_fails_is_a_finding(machine: Path) -> None:
    (machine / "sys/fs/cgroup/unit/pids.max").write_text("plenty\n")
    finding = found("limits", as_user(machine))
    assert not finding.ok
    assert "cannot be examined" in finding.what


def test_this_machines_pyfuse3_and_libfuse_are_named(machine: Path) -> None:
    assert found("pyfuse3", as_user(machine)).what.startswith("version ")
    assert "libfuse3" in found("libfuse", as_user(machine)).what


def test_journals_that_are_kept_and_damaged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("kept", "damaged"):
        place = tmp_path / "vfsd" / "journals" / name
        Journal.create(str(place), {"backend": "memory", "workspace": name}, "no").close()
    log = tmp_path / "vfsd" / "journals" / "damaged" / "log-00000001"
    log.write_bytes(b"x" * 100)
    found = [finding for finding in examine() if finding.topic == "journals"]
    assert [finding.ok for finding in found] == [False, True]
    assert "`vfsd persisted drop damaged`" in found[0].advice
    assert "kept without a running daemon: kept (" in found[1].what
