"""What one mount is asked to be: the options that command line, Python API and systemd unit share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from vfsd.wire.backend_spec import MEMORY, BackendSpec

__all__ = ["ENGINES", "NAME_PATTERN", "TRANSPORTS", "EngineChoice", "MountOptions", "TransportChoice"]

EngineChoice = Literal["auto", "native", "pyfuse3"]
ENGINES: Final = ("auto", "native", "pyfuse3")
TransportChoice = Literal["auto", "rootfs", "agent"]
TRANSPORTS: Final = ("auto", "rootfs", "agent")
# A name is a file name of the socket and a systemd instance name: nothing to quote in either.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Options of one mount.  Paths absolute, sizes in bytes, None for no limit.

    `cache_timeout_s`: how long the kernel may go by what it knows of a directory that others change too, None
    for the backend's own.
    `log_format`: "text" for people, "json" one object a line, "journal" sd-daemon priority prefixes.
    """

    mountpoint: str
    name: str
    backend: BackendSpec = MEMORY
    engine: EngineChoice = "auto"
    archive: str | None = None  # --from
    max_bytes: int | None = None
    max_memory: int | None = None  # content, metadata and snapshots together; None for half of what the daemon may have
    max_inodes: int | None = None
    read_only: bool = False
    allow_other: bool = False
    cache_timeout_s: float | None = None  # --cache-timeout
    xattrs: bool = True  # --no-xattrs: without extended attributes and ACLs, and without the requests for them
    include: tuple[str, ...] = ()  # patterns in gitignore's syntax: what of overlay:DIR is shown, and what not
    exclude: tuple[str, ...] = ()
    exec_on_host: bool = False  # `vfsd fs exec` runs commands on this host, as the daemon's user
    store: str | None = None  # where snapshots are kept that are not in memory; None for the user's store
    sandbox: BackendSpec | None = None  # image:REF: commands run in a container of it, which sees the mount
    snapshot_each: bool = False  # a snapshot after each command that the workspace ran
    # Of container:NAME and image:REF.
    podman_url: str | None = None  # None: $CONTAINER_HOST, else the user's own service
    workdir: str | None = None  # in the container; None for /workspace
    transport: TransportChoice = "auto"
    network: str | None = None  # of a container that is made; None for none
    pids_limit: int | None = None  # processes and threads in a container that is made; None for 2048
    memory_bytes: int | None = None  # what they may take of the machine's memory, all together
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json", "journal"] = "text"
