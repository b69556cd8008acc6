"""A real sshd of a test's own on the loopback interface, and an `ssh` that uses its keys instead of the user's."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("openssh-server", "openssh-client")
_START_S = 30.0
_SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {place}/host_key
AuthorizedKeysFile {place}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """
Host *
  IdentityFile {place}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {place}/known_hosts
  GlobalKnownHostsFile none
"""


class NoSshdError(Exception):
    """Why no sshd can be run here."""


@dataclass(frozen=True, slots=True)
class Sshd:
    """`host` is [USER@]HOST:PORT; `programs` a directory for PATH, whose `ssh` has the keys."""

    host: str
    programs: Path
    known_hosts: Path


@contextmanager
def running_sshd(place: Path) -> Iterator[Sshd]:
    """An sshd with fresh keys below `place`.  NoSshdError where it cannot run."""
    server, client = shutil.which("sshd", path="/usr/sbin:/usr/bin"), shutil.which("ssh")
    if server is None or client is None:
        raise NoSshdError(f"install {' and '.join(PACKAGES)}")
    place.mkdir()
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (place / "sshd_config").write_text(_SERVER.format(place=place, port=port))
    (place / "ssh_config").write_text(_CLIENT.format(place=place))
    kind, key, *_ = (place / "host_key.pub").read_text().split()
    (place / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (place / "bin").mkdir()
    program = place / "bin" / "ssh"
    program.write_text(f'#!/bin/sh\nexec {client} -F {place}/ssh_config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its chroot: empty, and made by Debian's service otherwise
    with (place / "log").open("wb") as log:
        # -D: it stays this process's child, and ends with it.
        command = ["setpriv", "--pdeathsig=TERM", server, "-D", "-e", "-f", place / "sshd_config"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_for(port, process, place / "log")
        yield Sshd(f"{getpass.getuser()}@127.0.0.1:{port}", place / "bin", place / "known_hosts")
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise NoSshdError(log.read_text(errors="replace")[-1000:])
        time.sleep(0.02)
