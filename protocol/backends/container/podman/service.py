"""PodmanService and Container: the life of containers, through Podman's own client.

podman-py makes, starts, inspects and removes.  It is not asked for what it does badly: a stream into a running
command (`exec_run(socket=True)` is ignored), archives (buffered whole), an ssh that checks no host key.  Through
ssh a tunnel of ours leads to the service's socket (`Tunnel`), so that beyond this module every service
is a socket (`connect`).

Threading: every method blocks, and may be called by any thread: each call has a client of its own, so nothing
is shared, and a service that was restarted in between is not noticed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from podman import PodmanClient
from podman.errors import APIError, PodmanError
from requests import RequestException

from protocol.backends.container.podman.address import ServiceAddress, default_address, parse_address
from protocol.backends.container.podman.pull_errors import ImageNotFoundError, pull_error
from protocol.backends.container.podman.state import ContainerMount, ContainerState, state_of
from protocol.backends.container.podman.tunnel import Tunnel
from protocol.backends.container.podman.ulimits import own_hard_limits, permitted_ulimits

__all__ = ["INIT_COMMAND", "PIDS_LIMIT", "Container", "ContainerNotFoundError", "ImageNotFoundError", "PodmanService"]

PIDS_LIMIT: Final = 2048  # what `podman run` sets too: containers.conf(5)
# The first process of a container of ours: it waits, and reaps what others leave (wait waits for every child).
INIT_COMMAND: Final = ("/bin/sh", "-c", 'trap "exit 0" TERM INT; while :; do sleep 86400 & wait $!; done')
_TIMEOUT_S: Final = 60.0
_PULL_TIMEOUT_S: Final = 3600.0
# What --network takes beside the names of networks: podman-run(1).
_NETWORK_MODES: Final = ("none", "bridge", "host", "private", "slirp4netns", "pasta", "container:", "ns:")
_NOT_FOUND: Final = 404
# Podman may find a container's /dev/shm still busy when it has just killed what ran there.
_REMOVAL_PAUSES_S: Final = (0.1, 0.5, 2.0)
_CONFLICT: Final = 409


class ContainerNotFoundError(FileNotFoundError):
    """There is no container of that name (ENOENT)."""

    def __init__(self, name: str, service: ServiceAddress) -> None:
        super().__init__(errno.ENOENT, f"no container of that name at {service}; `podman ps -a` lists them", name)


class PodmanService:
    """A Podman service at `url`: unix:///PATH, ssh://[USER@]HOST[:PORT]/PATH or tcp://HOST[:PORT].

    None: $CONTAINER_HOST, else the socket of the user's own service.  Nothing is asked of it before the first call.
    `close` ends the tunnel, where there is one.
    """

    def __init__(self, url: str | None = None) -> None:
        self.address: Final = default_address() if url is None else parse_address(url)
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            if self._tunnel is not None:
                self._tunnel.close()
                self._tunnel = None

    def __enter__(self) -> PodmanService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the connection ------------------------------------------------------------------------
    @property
    def is_local(self) -> bool:
        """Whether it listens on a socket of this machine.  (Behind that may be a tunnel all the same.)"""
        return self.address.kind == "unix"

    def connect(self) -> socket.socket:
        """A new connection to the service, for HTTP of one's own; blocking.  OSError that says what to do."""
        try:
            return _connection(self._reached())
        except OSError as error:
            raise self._unreachable(error) from None

    def version(self) -> str:
        """The service's version; also the cheapest way to see that it answers."""
        with self._client("asking for the version") as client:
            return str(client.version()["Version"])  # type: ignore[no-untyped-call]

    def _reached(self) -> ServiceAddress:
        """The address to connect to: behind ssh, the near end of the tunnel."""
        if self.address.kind != "ssh":
            return self.address
        with self._lock:
            if self._tunnel is None or not self._tunnel.alive:
                if self._tunnel is not None:
                    self._tunnel.close()
                self._tunnel = Tunnel(self.address)
            return ServiceAddress("unix", path=self._tunnel.path)

    @contextlib.contextmanager
    def _client(self, doing: str, *, timeout_s: float = _TIMEOUT_S) -> Iterator[PodmanClient]:
        with self._explained(doing):
            # Its own errors about connections hide their errno, and leak the socket.
            self.connect().close()
            with PodmanClient(base_url=self._reached().url, timeout=timeout_s) as client:
                yield client

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """What the client raises, as an OSError whose text helps."""
        try:
            yield
        except APIError as error:
            if _status_of(error) is None:
                raise self._unanswered(doing, error) from None
            raise _refused(doing, error) from None
        except RequestException as error:
            # The connection broke, or was too slow: what went wrong below is wrapped several times.
            raise OSError(_code_of(error) or errno.EIO, f"{doing}: {error}", self.address.url) from None
        except PodmanError as error:
            raise OSError(errno.EIO, f"{doing}: {error}", self.address.url) from None

    def _unanswered(self, doing: str, error: APIError) -> OSError:
        """The error for a connection that was accepted and closed without an answer."""
        reason = "the Podman service closed the connection without an answer"
        if self.address.kind == "ssh":  # ssh accepts here, and then finds no socket there
            reason = f"no Podman service answers at {self.address.path} on {self.address.host}; start it there: "
            reason += "systemctl [--user] enable --now podman.socket"
        return OSError(_code_of(error) or errno.ECONNRESET, f"{doing}: {reason}", self.address.url)

    def _unreachable(self, error: OSError) -> OSError:
        code = error.errno or errno.EIO
        advice = {
            errno.ENOENT: f"no Podman service is there; start one: {_start_command(self.address)}",
            errno.ECONNREFUSED: f"no Podman service listens there; start it: {_start_command(self.address)}",
            errno.EACCES: "the Podman service there is another user's; leave --podman-url out to use your own",
        }.get(code)
        if advice is None or self.address.kind == "ssh":
            advice = f"the Podman service cannot be reached: {error.strerror or error}"
        return OSError(code, advice, self.address.url)

    # -- containers ----------------------------------------------------------------------------
    def inspect(self, name: str) -> ContainerState:
        """The container `name` (or an id) as it is now.  ContainerNotFoundError."""
        with self._client(f"inspecting {name}") as client:
            # The answer as it came: what the client's own classes show of it is less.
            return state_of(self._checked(name, lambda: client.containers.get(name).attrs))

    def container(self, name: str) -> Container:
        """A handle of the container `name`, which must exist.  ContainerNotFoundError."""
        state = self.inspect(name)
        return Container(self, state.id, state.name)

    def labelled(self, labels: Mapping[str, str]) -> list[ContainerState]:
        """All containers, running or not, that have all these labels.  A value of "" stands for any."""
        wanted = [f"label={key}={value}" if value else f"label={key}" for key, value in labels.items()]
        with self._client("listing containers") as client:
            names = [one.id for one in client.containers.list(all=True, filters=wanted, sparse=True)]
        found = []
        for name in names:
            with contextlib.suppress(ContainerNotFoundError):  # removed meanwhile
                found.append(self.inspect(str(name)))
        return found

    def create(
        self,
        image: str,
        *,
        name: str | None = None,
        command: Sequence[str] | None = INIT_COMMAND,
        network: str = "none",
        pids_limit: int = PIDS_LIMIT,
        memory_bytes: int | None = None,
        user: str | None = None,
        working_dir: str | None = None,
        labels: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        mounts: Sequence[ContainerMount] = (),
        read_only: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Container:
        """A container of `image`, not started.  ImageNotFoundError; OSError (EEXIST) for a name in use.

        `command` takes the place of the image's entrypoint and command; None leaves both.  `options` are passed
        on to `podman.domain.containers_create.CreateMixin.create` as they are.  Limits above this process's own are
        lowered where the service is on this machine, because it could not set them.
        """
        wanted: dict[str, Any] = {
            "name": name,
            "pids_limit": pids_limit,
            "mem_limit": memory_bytes,
            "user": user,
            "working_dir": working_dir,
            "labels": dict(labels or {}),
            "environment": dict(environment or {}),
            "mounts": [_mount_option(mount) for mount in mounts],
            "read_only": read_only,
            **_network_options(network),
            **(options or {}),
        }
        if command is not None:
            wanted["entrypoint"], wanted["command"] = [command[0]], list(command[1:])
        given = {key: value for key, value in wanted.items() if value not in (None, [], {})}
        with self._client(f"creating a container of {image}") as client:
            command_given = given.pop("command", None)
            made = client.containers.create(image, command_given, **given)
            ulimits = permitted_ulimits(made.attrs, own_hard_limits()) if self.is_local else []
            if ulimits:
                made.remove(v=True, force=True)
                made = client.containers.create(image, command_given, **{**given, "ulimits": ulimits})
            return Container(self, str(made.id), str(made.name))

    def _checked(self, name: str, call: Any) -> Any:
        try:
            return call()
        except APIError as error:
            if _status_of(error) == _NOT_FOUND:
                raise ContainerNotFoundError(name, self.address) from None
            raise

    # -- images --------------------------------------------------------------------------------
    def image_exists(self, reference: str) -> bool:
        """Whether the service has the image."""
        with self._client(f"looking for the image {reference}") as client:
            return bool(client.images.exists(reference))

    def pull(self, reference: str) -> None:
        """Get an image from its registry.

        ImageNotFoundError: the registry has no such image; PermissionError: it denies access; OSError (EHOSTUNREACH):
        it cannot be reached; OSError (EINVAL): `reference` names no image; other OSErrors.
        """
        with self._client(f"pulling {reference}", timeout_s=_PULL_TIMEOUT_S) as client:
            # As a stream: else the errors in it are not looked at.  Without "tlsVerify", which podman-py otherwise
            # sends as true, and which overrides registries.conf(5).
            try:
                lines = client.images.pull(reference, stream=True, decode=True, compatMode=False, tls_verify=None)
                said: list[object] = [*lines] if isinstance(lines, Iterator) else []
            except APIError as error:
                raise pull_error(reference, str(error.explanation or error)) from None
        errors = [str(line["error"]) for line in said if isinstance(line, dict) and line.get("error")]
        if errors:
            raise pull_error(reference, errors[-1])


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a service; an id stays that container's, whatever else takes its name."""

    service: PodmanService
    id: str
    name: str

    def inspect(self) -> ContainerState:
        """As it is now.  ContainerNotFoundError when it was removed."""
        return self.service.inspect(self.id)

    def start(self) -> None:
        """Start it; nothing where it runs already."""
        self._do("starting", lambda one: one.start())

    def stop(self, timeout_s: int = 10) -> None:
        """SIGTERM to its init, and SIGKILL when that has not ended in `timeout_s`; returns when it has."""
        self._do("stopping", lambda one: one.stop(timeout=timeout_s, ignore=True))

    def restart(self, timeout_s: int = 10) -> None:
        self._do("restarting", lambda one: one.restart(timeout=timeout_s))

    def kill(self, signal: str = "SIGKILL") -> None:
        self._do("killing", lambda one: one.kill(signal))

    def pause(self) -> None:
        self._do("pausing", lambda one: one.pause())

    def unpause(self) -> None:
        self._do("unpausing", lambda one: one.unpause())

    def remove(self) -> None:
        """Kill it, and remove it with its anonymous volumes; nothing where it is gone already."""
        with contextlib.suppress(OSError):  # it does not run
            self.kill()  # removing would first ask it to end, and give it ten seconds
        for pause_s in _REMOVAL_PAUSES_S:
            try:
                return self._remove()
            except OSError as error:
                if "resource busy" not in str(error):
                    raise
                time.sleep(pause_s)
        return self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(ContainerNotFoundError):
            self._do("removing", lambda one: one.remove(v=True, force=True))

    def _do(self, doing: str, action: Any) -> None:
        service = self.service
        with service._client(f"{doing} the container {self.name}") as client:  # noqa: SLF001 (one module, two classes)
            service._checked(self.name, lambda: action(client.containers.get(self.id)))  # noqa: SLF001


# -- what the service is told ------------------------------------------------------------------------
def _network_options(network: str) -> dict[str, Any]:
    if any(network == mode or (network.startswith(mode) and mode.endswith(":")) for mode in _NETWORK_MODES):
        return {"network_mode": network}
    return {"network_mode": "bridge", "networks": {network: {}}}


def _mount_option(mount: ContainerMount) -> dict[str, Any]:
    option: dict[str, Any] = {"type": mount.kind, "target": mount.destination, "read_only": mount.read_only}
    if mount.source:
        option["source"] = mount.source
    if mount.size_bytes is not None:
        option["size"] = mount.size_bytes
    return option


# -- what went wrong ---------------------------------------------------------------------------------
def _status_of(error: APIError) -> int | None:
    return int(error.status_code) if error.status_code else None


def _refused(doing: str, error: APIError) -> OSError:
    """What the service answered with, in its own words."""
    said = str(error.explanation or error)
    code = {_NOT_FOUND: errno.ENOENT, _CONFLICT: errno.EBUSY}.get(_status_of(error) or 0, errno.EIO)
    if "is already in use" in said:
        code = errno.EEXIST
    if "executable file" in said or ("no such file or directory" in said and "exec" in said):
        said += " (the image lacks /bin/sh, which keeps a container of vfsd's alive; use one that has it)"
    return OSError(code, f"{doing}: {said}")


def _connection(address: ServiceAddress) -> socket.socket:
    if address.kind == "tcp":
        return socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(address.path)
    except BaseException:
        client.close()
        raise
    return client


def _start_command(address: ServiceAddress) -> str:
    if address.kind != "unix":
        return f"podman system service --time=0 {address.url if address.kind == 'tcp' else f'unix://{address.path}'}"
    return f"systemctl {'' if os.geteuid() == 0 else '--user '}enable --now podman.socket"


def _code_of(error: BaseException) -> int | None:
    """The errno at the root of what urllib3 and requests wrap several times."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, TimeoutError):
            return errno.ETIMEDOUT
        if isinstance(one, OSError) and one.errno:
            return one.errno
        waiting += [*one.args, one.__cause__, one.__context__, getattr(one, "reason", None)]
    return None
