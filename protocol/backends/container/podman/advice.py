"""Commands to advise for a Podman service: what starts it, and the `podman` that reaches it.

Source: podman-system-service(1), podman(1) ("--url", CONTAINER_HOST); podman.socket of systemd, for root and for users.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Final

from protocol.backends.container.podman.address import ServiceAddress, default_address, own_socket

_OF_ROOT: Final = "/run/podman/podman.sock"
_OF_USER: Final = re.compile("/run/user/([0-9]+)/podman/podman.sock")
_SOCKET_UNIT: Final = "enable --now podman.socket"


def podman(address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Return the command that reaches the service at `address`: `podman`, with --url if it would use another one."""
    try:
        is_default = address == default_address(environ, uid)
    except ValueError:  # $CONTAINER_HOST is no address
        is_default = False
    return "podman" if is_default else f"podman --url {shlex.quote(address.url)}"


def start(address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Return how to start the service at `address`: a command, and as whom to run it if not as this user.

    For `ssh://` on that host.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if address.kind == "tcp":
        return f"on {address.host}: podman system service --time=0 {address.url}"
    user = _OF_USER.fullmatch(address.path)
    if address.kind == "unix" and address.path == own_socket(environ, uid):
        return f"systemctl {'' if uid == 0 else '--user '}{_SOCKET_UNIT}"
    if address.path == _OF_ROOT:
        return f"as root: systemctl {_SOCKET_UNIT}"
    if user is not None:
        return f"as the user with the id {user[1]}: systemctl --user {_SOCKET_UNIT}"
    return f"podman system service --time=0 unix://{shlex.quote(address.path)}"


def other_service(address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Return what to change to use another service than that at `address`; "" if it is the user's own."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if address == ServiceAddress("unix", path=own_socket(environ, uid)):
        return ""
    named = environ.get("CONTAINER_HOST")
    return "unset CONTAINER_HOST" if named and podman(address, environ, uid) == "podman" else "leave out --podman-url"
