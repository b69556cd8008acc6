"""ServiceAddress: the address of a Podman service, from a URL or from the user's environment.

Source: podman-system-service(1), podman(1) ("--url", CONTAINER_HOST).
"""

from __future__ import annotations

import os
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
