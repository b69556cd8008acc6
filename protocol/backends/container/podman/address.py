"""ServiceAddress: the address of a Podman service, from a URL or from the user's environment.

The functions with advice return what starts a service, and the `podman` that reaches it.

Source: podman-system-service(1), podman(1) ("--url", CONTAINER_HOST); podman.socket of systemd, for root and for users.
"""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

_TCP_PORT: Final = 8080  # podman-system-service(1)


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """One Podman service.  `path` is the socket's (unix, ssh), `host` is [USER@]HOST, `port` None the default."""

    kind: Literal["unix", "ssh", "tcp"]
    path: str = ""
    host: str = ""
    port: int | None = None

    @property
    def url(self) -> str:
        """The address in the form of --podman-url."""
        if self.kind == "unix":
            return f"unix://{self.path}"
        user, at, host = self.host.rpartition("@")
        host = f"[{host}]" if ":" in host else host  # IPv6 addresses: RFC 3986
        return f"{self.kind}://{user}{at}{host}{f':{self.port}' if self.port else ''}{self.path}"

    def __str__(self) -> str:
        return self.url


def parse_address(url: str) -> ServiceAddress:
    """The service that `url` names.  ValueError for anything but unix:///PATH, ssh://[USER@]HOST[:PORT]/PATH and
    tcp://HOST[:PORT]."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    user, at, place = parts.netloc.rpartition("@")
    # Names in ssh_config(5) are case-sensitive, and `hostname` is lower case.
    start = place.lower().find(parts.hostname or "")
    host = user + at + place[start : start + len(parts.hostname or "")]
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return ServiceAddress("unix", path=parts.path)
    # ssh would take a host that begins with "-" for an option.
    if parts.scheme == "ssh" and parts.hostname and port != -1 and not host.startswith("-") and len(parts.path) > 1:
        return ServiceAddress("ssh", path=parts.path, host=host, port=port)
    if parts.scheme == "tcp" and parts.hostname and port != -1 and parts.path in {"", "/"}:
        return ServiceAddress("tcp", host=parts.hostname, port=port or _TCP_PORT)
    raise ValueError(
        f"{url!r} is not the address of a Podman service; use unix:///PATH, ssh://[USER@]HOST[:PORT]/PATH or tcp://HOST[:PORT]"
    )


def default_address(environ: Mapping[str, str] | None = None, uid: int | None = None) -> ServiceAddress:
    """$CONTAINER_HOST, else `own_socket`.  ValueError."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    named = environ.get("CONTAINER_HOST")
    if named:
        return parse_address(named)
    return ServiceAddress("unix", path=own_socket(environ, uid))


def own_socket(environ: Mapping[str, str], uid: int) -> str:
    """The socket that `systemctl [--user] enable --now podman.socket` makes for the user `uid`."""
    directory = "/run" if uid == 0 else environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    return os.path.join(directory, "podman/podman.sock")


_OF_ROOT: Final = "/run/podman/podman.sock"
_OF_USER: Final = re.compile("/run/user/([0-9]+)/podman/podman.sock")
_SOCKET_UNIT: Final = "enable --now podman.socket"


def podman_command(address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Return the command that reaches the service at `address`: `podman`, with --url if it would use another one."""
    try:
        is_default = address == default_address(environ, uid)
    except ValueError:  # $CONTAINER_HOST is no address
        is_default = False
    return "podman" if is_default else f"podman --url {shlex.quote(address.url)}"


def start_advice(address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
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


def other_service_advice(
    address: ServiceAddress, environ: Mapping[str, str] | None = None, uid: int | None = None
) -> str:
    """Return what to change to use another service than that at `address`; "" if it is the user's own."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    if address == ServiceAddress("unix", path=own_socket(environ, uid)):
        return ""
    named = environ.get("CONTAINER_HOST")
    return (
        "unset CONTAINER_HOST"
        if named and podman_command(address, environ, uid) == "podman"
        else "leave out --podman-url"
    )
