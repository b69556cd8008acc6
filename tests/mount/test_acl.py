"""POSIX ACLs by setfacl and getfacl: the same commands on tmpfs and on mounts, and ACLs that travel in trees."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import provided
from tests.mount.programs import Program
from tests.support.rights import need_root
from tests.support.session_directories import new_directory
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]
ALICE, BOB, TEAM = 61_001, 61_002, 61_003
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_numbers = itertools.count()


def run(place: Path, script: str, umask: int = 0o022) -> str:
    """What a shell that runs `script` in `place` says, on both its outputs."""
    return subprocess.run(
        ["sh", "-c", script],
        cwd=place,
        umask=umask,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    ).stdout


def facl(path: Path) -> list[str]:
    return subprocess.run(["getfacl", "-cnEp", path], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def oracle(session_dir: str) -> Iterator[Path]:
    path = new_directory(session_dir, "acl-oracle")
    with provided("tmpfs", path) as root:
        yield root


@pytest.fixture
def beside(oracle: Path) -> Path:
    """A directory on tmpfs, to do the same in."""
    path = oracle / f"o{next(_numbers)}"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def alice(place: Path) -> Iterator[Program]:
    need_root()
    with Program(cwd=place) as program:
        program(f"os.setgroups([]); os.setresgid({ALICE}, {ALICE}, {ALICE})")
        program(f"os.setresuid({ALICE}, {ALICE}, {ALICE})")
        yield program


# -- what setfacl and chmod do ------------------------------------------------------------------------
SCRIPTS = {
    "set, chmod, remove": f"""
        echo x > f; chmod 640 f
        setfacl -m u:{ALICE}:rw,g:{BOB}:r f; getfacl -cn f; stat -c %a f
        chmod 604 f; getfacl -cn f; stat -c %a f
        chmod g+x f; getfacl -cn f; stat -c %a f
        setfacl -x u:{ALICE} f; getfacl -cn f
        setfacl -b f; getfacl -cn f; stat -c %a f; getfattr -m- -d f""",
    "an ACL that is only a mode": """
        touch f; setfacl -m u::rwx,g::r,o::- f; getfacl -cn f; stat -c %a f; getfattr -m- f""",
    "a mask of its own": f"""
        touch f; setfacl -m u:{ALICE}:rwx,m::r f; getfacl -cn f; stat -c %a f; getfattr -m- f""",
    "what may not have one": f"""
        touch f; ln -s f l; mkfifo p; mknod n c 1 3
        setfacl -d -m u:{ALICE}:rw f; setfacl -m u:{ALICE}:rw p n; getfacl -cn p n; ls -l l | cut -c1-10
        setfacl -k f; setfacl -b f; setfacl -x u:{BOB} f; setfacl -m u:{ALICE}:rw gone""",
    "removing what is not there": """
        touch f; mkdir d
        setfattr -x system.posix_acl_access f; setfattr -x system.posix_acl_default f
        setfattr -x system.posix_acl_default d; setfattr -n system.posix_acl_access -v nonsense f
        setfattr -n system.posix_acl_default -v 0x0200000001000700ffffffff d""",
    "sgid and sticky stay": f"""
        mkdir d; chmod 3775 d; setfacl -m u:{ALICE}:rwx d; stat -c %a d; chmod 0700 d; getfacl -cn d""",
    "copies and links": f"""
        touch f; setfacl -m u:{ALICE}:rw f; ln f g; cp -a f h; mv g i; getfacl -cn h i
        setfacl -b f; getfacl -cn i; stat -c '%a %h' i""",
    "a long ACL": """
        touch f; for n in $(seq 1000 1400); do echo u:$n:rw; done | setfacl -M- f; getfacl -cn f | wc -l""",
}
INHERITANCE = {
    "what is made": f"""
        mkdir d; setfacl -d -m u:{ALICE}:rwx,g::rx,o::- d; getfacl -cn d
        touch d/f; mkdir d/s d/s/t; ln -s x d/l; mkfifo d/p; install -m 600 /dev/null d/i
        getfacl -cn d/f d/s d/s/t d/p d/i; stat -c '%a %F' d/*""",
    "a default that is only a mode": "mkdir d; setfacl -d -m u::rwx,g::rwx,o::rwx d; touch d/f; mkdir d/s; "
    "stat -c %a d/f d/s; getfacl -cn d/s; getfattr -m- d/f",
    "a default that forbids": f"""
        mkdir d; setfacl -d -m u::r,u:{ALICE}:-,g::-,o::- d; touch d/f; mkdir d/s; getfacl -cn d/f d/s""",
    "set-group-id": f"mkdir d; chgrp {TEAM} d; chmod 2775 d; setfacl -d -m g:{TEAM}:rwx d; mkdir d/s; touch d/f; "
    "stat -c '%a %g' d/s d/f; getfacl -cn d/s",
    "no default any more": f"mkdir d; setfacl -d -m u:{ALICE}:rwx d; setfacl -k d; touch d/f; stat -c %a d/f",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_acls_are_set_shown_and_removed_as_on_tmpfs(engine: str, mount: MountIt, beside: Path, script: str) -> None:
    assert run(Path(mount().path), script) == run(beside, script)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
@pytest.mark.parametrize("script", INHERITANCE.values(), ids=INHERITANCE)
def test_a_default_acl_is_inherited_as_on_tmpfs_whatever_the_umask(
    workdir: Path, beside: Path, script: str, umask: int
) -> None:
    (workdir / "m").mkdir()
    with provided("native", workdir / "m") as root:
        assert run(root, script, umask) == run(beside, script, umask)


def test_with_the_pyfuse3_engine_the_umask_narrows_a_default_acl(workdir: Path) -> None:
    (workdir / "m").mkdir()
    with provided("pyfuse3", workdir / "m") as root:
        run(root, f"mkdir d; setfacl -d -m u:{ALICE}:rwx,o::rx d; touch d/f; umask 0; touch d/g", umask=0o077)
        assert facl(root / "d" / "f") == ["user::rw-", f"user:{ALICE}:rwx", "group::---", "mask::---", "other::---"]
        assert facl(root / "d" / "g") == ["user::rw-", f"user:{ALICE}:rwx", "group::---", "mask::rw-", "other::r--"]


def test_a_tmpfile_inherits_too(place: Path, kind: str) -> None:
    if kind == "pyfuse3":
        return  # has no O_TMPFILE (test_semantics_files.py)
    run(place, f"setfacl -d -m u:{ALICE}:rw,o::- .")
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR, 0o666)
    assert os.fstat(fd).st_mode & 0o777 == 0o660
    assert os.listxattr(fd) == [ACCESS]
    os.close(fd)


# -- access ---------------------------------------------------------------------------------------------
def test_an_acl_lets_in_and_keeps_out(place: Path, alice: Program) -> None:
    (place / "f").write_text("content")
    (place / "f").chmod(0o600)
    with pytest.raises(PermissionError):
        alice("open('f').close()")
    run(place, f"setfacl -m u:{ALICE}:r f")
    assert alice("open('f').read()") == "content"
    with pytest.raises(PermissionError):
        alice("open('f', 'a').close()")
    run(place, f"setfacl -m u:{ALICE}:rw f")
    alice("open('f', 'a').close()")
    (place / "f").chmod(0o600)  # the mask goes
    with pytest.raises(PermissionError):
        alice("open('f').close()")
    (place / "f").chmod(0o664)
    alice("open('f', 'a').close()")
    run(place, f"setfacl -nm u:{ALICE}:- f")  # what others may, she may not
    with pytest.raises(PermissionError):
        alice("open('f').close()")
    run(place, "setfacl -b f; chmod 644 f")
    assert alice("open('f').read()") == "content"


def test_only_the_owner_sets_an_acl(place: Path, alice: Program) -> None:
    (place / "f").write_text("content")
    run(place, "setfacl -m u:1:r f")
    value = os.getxattr(place / "f", ACCESS)
    assert alice(f"os.getxattr('f', {ACCESS!r})") == value
    with pytest.raises(PermissionError) as raised:
        alice(f"os.setxattr('f', {ACCESS!r}, value)", value=value)
    assert raised.value.errno == errno.EPERM
    with pytest.raises(PermissionError):
        alice(f"os.removexattr('f', {ACCESS!r})")
    alice("open('mine', 'x').close()")
    alice(f"os.setxattr('mine', {ACCESS!r}, value)")
    assert facl(place / "mine") == facl(place / "f")


def test_an_acl_set_by_who_is_not_of_the_group_drops_set_group_id(place: Path, alice: Program, kind: str) -> None:
    (place / "f").touch()
    os.chown(place / "f", ALICE, TEAM)
    (place / "f").chmod(0o2755)
    run(place, "touch g; setfacl -m u:1:r g")
    alice(f"os.setxattr('f', {ACCESS!r}, value)", value=os.getxattr(place / "g", ACCESS))
    assert bool((place / "f").stat().st_mode & 0o2000) == (kind == "pyfuse3")


# -- trees ----------------------------------------------------------------------------------------------
def test_acls_are_in_snapshots_diffs_and_archives(mount: MountIt, workdir: Path) -> None:
    workspace = mount(allow_other=True)
    root = Path(workspace.path)
    run(root, f"mkdir d; echo secret > d/f; chmod 600 d/f; setfacl -m u:{ALICE}:rw d/f; setfacl -d -m u:{BOB}:rx d")
    file, directory = facl(root / "d" / "f"), facl(root / "d")
    assert f"user:{ALICE}:rw-" in file
    assert f"default:user:{BOB}:r-x" in directory
    workspace.snapshot("with")
    run(root, "setfacl -b d/f; setfacl -k d")
    assert [change.path for change in workspace.diff("with").changes] == ["d", "d/f"]
    with Program(cwd=root) as alice:
        alice(f"os.setgroups([]); os.setresgid({ALICE}, {ALICE}, {ALICE}); os.setresuid({ALICE}, {ALICE}, {ALICE})")
        with pytest.raises(PermissionError):
            alice("open('d/f').close()")
        workspace.restore("with")
        assert (facl(root / "d" / "f"), facl(root / "d")) == (file, directory)
        assert alice("open('d/f').read()") == "secret\n"
        workspace.undo()
        with pytest.raises(PermissionError):
            alice("open('d/f').close()")
    workspace.export(workdir / "a.zip", snapshot="with")
    copy = Path(mount(archive=workdir / "a.zip").path)
    assert (facl(copy / "d" / "f"), facl(copy / "d")) == (file, directory)
