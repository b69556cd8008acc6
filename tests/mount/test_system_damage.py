"""An agent in `vfsd run --system` damages a machine in eleven ways; each is seen, taken back, and absent at the end.

The machine is a small one: a root directory in memory, with the programs of this machine bound into it read-only, in a
mount namespace of its own.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mount.programs import VFSD
from tests.support.rights import needs_root
from vfsd.machine.runtime import WORKSPACE_VARIABLE

pytestmark = [needs_root, pytest.mark.extended]

_MAKE = r"""
set -e
root=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$root"
cd "$root"
mkdir dev etc home proc run settings sys tmp var
mount -t tmpfs none home        # a disk of its own
mount -t sysfs none settings    # a file system of another kind
for path in /*; do
    name=${path#/}
    if [ -L "$path" ]; then cp -a "$path" .
    elif [ -d "$path" ] && [ ! -e "$name" ]; then
        mkdir "$name"
        mount --bind "$path" "$name"
        mount -o remount,bind,ro "$name"
    fi
done
for name in dev proc sys; do mount --rbind /$name $name; done
for name in run tmp; do mount --bind /$name $name; done
cp -a /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache /etc/alternatives /etc/mtab etc/
mkdir -p etc/cron.d local/bin local/lib/node_modules local/lib/python3/site-packages var/lib/app var/log
mkdir -p home/agent/project/.git/hooks home/agent/project/build home/agent/data/deep
printf '#!/bin/sh\necho good\n' > local/bin/tool
chmod 755 local/bin/tool
echo 'alias ll=ls' > home/agent/.bashrc
echo build/ > home/agent/project/.gitignore
echo object > home/agent/project/build/object.o
echo source > home/agent/project/main.c
head -c 300000 /dev/urandom > var/lib/app/data.db
echo content > home/agent/data/deep/file
chown -R 1234:1234 home/agent
mkdir old
pivot_root . old
umount -l /old # also the mounts of other tests, whose daemons would wait for this copy
rmdir /old
echo ready
exec sleep 1000
"""

_DAMAGE = r"""
set -e
cd /home/agent/project
rm -r build                                                   # files that git ignores
chmod -R 777 /var/lib/app
mkdir -p /local/lib/node_modules/left-pad
echo '{}' > /local/lib/node_modules/left-pad/package.json # npm install --global
echo 'x = 1' > /local/lib/python3/site-packages/left_pad.py
echo '* * * * * root true' > /etc/cron.d/agent
echo 'alias ls=rm' >> /home/agent/.bashrc
printf '#!/bin/sh\n' > .git/hooks/pre-commit; chmod 755 .git/hooks/pre-commit
mkdir /home/agent/farm; for i in 1 2 3; do ln -s / /home/agent/farm/$i; done
: > /var/lib/app/data.db
mv /home/agent/data /home/agent/elsewhere
printf '#!/bin/sh\necho bad\n' > /local/bin/tool.new; chmod 755 /local/bin/tool.new
mv /local/bin/tool.new /local/bin/tool
head -c 100000000 /dev/zero > /var/full 2>/dev/null || echo full
/local/bin/tool
"""

# For each of them: what `vfsd diff` must show.
_SEEN = {
    "rm of ignored files": "D home/agent/project/build/object.o",
    "chmod -R": "m var/lib/app/",
    "npm install --global": "A local/lib/node_modules/left-pad/package.json",
    "pip install": "A local/lib/python3/site-packages/left_pad.py",
    "cron file": "A etc/cron.d/agent",
    "shell rc": "M home/agent/.bashrc",
    "git hook": "A home/agent/project/.git/hooks/pre-commit",
    "symlink farm": "A home/agent/farm/1",
    "truncated database": "M var/lib/app/data.db",
    "moved directory": "D home/agent/data/deep/file",
    "replaced program": "M local/bin/tool",
    "filled disk": "A var/full",
}
_OWN = ("etc", "home", "local", "var")


class Machine(NamedTuple):
    """A small machine: the process whose root directory it is."""

    holder: int

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.holder}", "--mount", "--root", "--wd"]
        return subprocess.run(
            [*enter, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300
        )

    def vfsd(self, *words: str) -> str:
        done = self.run(*VFSD, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self) -> dict[str, tuple[object, ...]]:
        """Everything of the machine's own files but the access times."""
        found = {}
        top = Path(f"/proc/{self.holder}/root")
        for own in _OWN:
            for directory, names, files in os.walk(top / own):
                for path in [Path(directory), *(Path(directory, name) for name in [*names, *files])]:
                    seen = path.lstat()
                    link = os.readlink(path) if stat.S_ISLNK(seen.st_mode) else ""
                    data = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
                    owner = seen.st_uid, seen.st_gid
                    found[str(path.relative_to(top))] = (seen.st_mode, owner, seen.st_mtime_ns, link, data)
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    root = tmp_path / "root"
    root.mkdir()
    command = ["unshare", "--mount", "sh", "-c", _MAKE, "sh", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        try:
            yield Machine(holder.pid)
        finally:
            holder.kill()


def test_a_file_system_of_another_kind_is_read_only_and_named(machine: Machine) -> None:
    script = "ls /settings/kernel > /dev/null && chmod 700 /settings/kernel"
    ran = machine.run(*VFSD, "run", "--system", "--discard", "--", "sh", "-c", script)
    assert "vfsd: read-only, because only local file systems can be in the overlay: /settings\n" in ran.stderr
    assert "Read-only file system" in ran.stderr
    assert ran.stderr.endswith("vfsd: the command changed nothing\n")


def test_what_is_left_out_of_the_overlay_is_not_removed_by_an_apply(machine: Machine) -> None:
    before = machine.state()
    script = "echo > /var/log/app.log; mv /var /home/moved; mkdir /var; cp -r /etc /home/copied"
    ran = machine.run(*VFSD, "run", "--system", "--name", "moved", "--apply", "--", "sh", "-c", script)
    assert "vfsd: var/log is left out of the overlay, and stays as it is" in ran.stderr
    assert machine.state() == before
    done = machine.run(*VFSD, "apply", "-w", "moved", "--force")
    assert done.returncode == 0, done.stderr
    after = machine.state()
    assert after["var/log"] == before["var/log"]
    assert "var/lib/app/data.db" not in after
    assert after["home/moved/lib/app/data.db"] == before["var/lib/app/data.db"], "on the other disk"
    assert after["home/copied/passwd"][-1] == before["etc/passwd"][-1]
    machine.vfsd("unmount", "moved", "--discard")


def test_an_apply_names_what_is_on_a_disk_that_is_mounted_read_only(machine: Machine) -> None:
    before = machine.state()
    script = "mkdir -p /usr/new/deep; echo > /usr/new/deep/file; chmod 700 /usr/bin; echo > /home/agent/added"
    ran = machine.run(*VFSD, "run", "--system", "--name", "some", "--apply", "--", "sh", "-c", script)
    assert "vfsd: usr is a directory of a file system that is mounted read-only" in ran.stderr
    assert machine.state() == before
    done = machine.run(*VFSD, "apply", "-w", "some", "--force")
    assert done.stdout == "applied to /: 1 added\n", done.stderr
    assert machine.state().keys() - before.keys() == {"home/agent/added"}
    machine.vfsd("discard", "-w", "some", "--", "usr/new")
    machine.vfsd("unmount", "some", "--discard")


@pytest.mark.slow
def test_eleven_kinds_of_damage_are_seen_undone_and_absent_after_a_discard(machine: Machine) -> None:
    before = machine.state()
    inner = shlex.join(VFSD)
    script = f"{inner} snapshot good; {_DAMAGE}"
    ran = machine.run(
        *VFSD, "run", "--system", "--keep", "--name", "damage", "--max-bytes", "32M", "--", "sh", "-c", script
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[:3] == ["good", "full", "bad"]
    assert machine.state() == before, "nothing is on the machine"

    seen = machine.vfsd("diff", "-w", "damage", "good").splitlines()
    assert {what: line for what, line in _SEEN.items() if line not in seen} == {}

    machine.vfsd("restore", "-w", "damage", "good")
    assert machine.vfsd("diff", "-w", "damage", "good") == ""
    machine.vfsd("restore", "-w", "damage", "--undo")
    assert machine.vfsd("diff", "-w", "damage", "good").splitlines() == seen

    machine.vfsd("apply", "-w", "damage", "--", "etc/cron.d/agent", "home/agent/.bashrc")
    applied = machine.state()
    changed = {path for path in applied.keys() | before.keys() if applied.get(path) != before.get(path)}
    assert changed - {"etc/cron.d", "home/agent"} == {"etc/cron.d/agent", "home/agent/.bashrc"}
    assert applied["home/agent/.bashrc"][1] == (1234, 1234), "with its owner"

    machine.vfsd("unmount", "damage", "--discard")
    assert machine.state() == applied
