"""PodmanService and Container: the life cycle of containers, through Podman's own client.

podman-py creates, starts, inspects and removes containers.  vfsd does itself what podman-py lacks: streams to a running
command (podman-py ignores `exec_run(socket=True)`) and an ssh tunnel that checks host keys (`Tunnel`).  Through the
tunnel every service is a socket to the rest of vfsd (`connect`).

Threading: every method blocks, and any thread may call it.  Each call creates a client of its own, so threads share
nothing, and a restart of the service between two calls does no harm.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from podman import PodmanClient
from podman.errors import APIError

from protocol.backends.container.podman.address import ServiceAddress, default_address, parse_address
from protocol.backends.container.podman.errors import (
    ContainerNotFoundError,
    connect_error,
    is_not_found,
    podman_errors,
    pull_error,
)
from protocol.backends.container.podman.spec import ContainerSpec
from protocol.backends.container.podman.state import ContainerState, state_of
from protocol.backends.container.podman.tunnel import Tunnel
from protocol.backends.container.podman.ulimits import own_hard_limits, permitted_ulimits

_TIMEOUT_S: Final = 60.0
_PULL_TIMEOUT_S: Final = 3600.0
# Podman may find a container's /dev/shm still busy just after it killed the container's processes.
_REMOVAL_PAUSES_S: Final = (0.1, 0.5, 2.0)


class PodmanService:
    """A Podman service at `url`: unix:///PATH, ssh://[USER@]HOST[:PORT]/PATH or tcp://HOST[:PORT].

    None means $CONTAINER_HOST, else the socket of the user's own service.  The first call connects.  `close` ends the
    ssh tunnel, if there is one.  `timeout_s`: of each call but a pull.
    """

    def __init__(self, url: str | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self.address: Final = default_address() if url is None else parse_address(url)
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            if self._tunnel is not None:
                self._tunnel.close()
                self._tunnel = None

    # -- the connection ------------------------------------------------------------------------
    @property
    def is_local(self) -> bool:
        """Whether the service listens on a socket of this machine.  (The socket may still be a tunnel's.)"""
        return self.address.kind == "unix"

    def connect(self) -> socket.socket:
        """Open a blocking connection to the service, for HTTP.  OSError that says what to do."""
        try:
            return _open_socket(self._endpoint())
        except OSError as error:
            raise connect_error(error, self.address) from None

    def _endpoint(self) -> ServiceAddress:
        """The address to connect to: for ssh, the near end of the tunnel."""
        if self.address.kind != "ssh":
            return self.address
        with self._lock:
            if self._tunnel is None or not self._tunnel.alive:
                if self._tunnel is not None:
                    self._tunnel.close()
                self._tunnel = Tunnel(self.address)
            return ServiceAddress("unix", path=self._tunnel.path)

    @contextlib.contextmanager
    def _client(self, doing: str, *, timeout_s: float | None = None) -> Iterator[PodmanClient]:
        with podman_errors(doing, self.address):
            # The client's own connection errors hide their errno and leak the socket.
            self.connect().close()
            with PodmanClient(base_url=self._endpoint().url, timeout=timeout_s or self._timeout_s) as client:
                yield client

    # -- containers ----------------------------------------------------------------------------
    def inspect(self, name: str) -> ContainerState:
        """The current state of the container `name` (or an id).  ContainerNotFoundError."""
        # The raw document: the client's own classes show less of it.
        return state_of(self.call(f"inspecting {name}", name, lambda one: one.attrs))

    def container(self, name: str) -> Container:
        """A handle of the container `name`.  ContainerNotFoundError."""
        state = self.inspect(name)
        return Container(self, state.id, state.name)

    def labelled(self, labels: Mapping[str, str]) -> list[ContainerState]:
        """All containers, running or not, that have all these labels.  The value "" matches any value."""
        wanted = [f"label={key}={value}" if value else f"label={key}" for key, value in labels.items()]
        with self._client("listing containers") as client:
            names = [one.id for one in client.containers.list(all=True, filters=wanted, sparse=True)]
        found = []
        for name in names:
            with contextlib.suppress(ContainerNotFoundError):  # removed meanwhile
                found.append(self.inspect(str(name)))
        return found

    def create(self, spec: ContainerSpec) -> Container:
        """Create a container without starting it.  ImageNotFoundError; OSError (EEXIST) for a name in use.

        If the service is on this machine, ulimits above this process's own are lowered, because the service could not
        set them.
        """
        arguments = spec.arguments()
        command = arguments.pop("command", None)
        with self._client(f"creating a container of {spec.image}") as client:
            made = client.containers.create(spec.image, command, **arguments)
            ulimits = permitted_ulimits(made.attrs, own_hard_limits()) if self.is_local else []
            if ulimits:
                made.remove(v=True, force=True)
                made = client.containers.create(spec.image, command, **{**arguments, "ulimits": ulimits})
            return Container(self, str(made.id), str(made.name))

    def call(self, doing: str, name: str, action: Callable[[Any], Any]) -> Any:
        """Call `action` with podman-py's object of a container.  ContainerNotFoundError."""
        with self._client(doing) as client:
            try:
                return action(client.containers.get(name))
            except APIError as error:
                if is_not_found(error):
                    raise ContainerNotFoundError(name, self.address) from None
                raise

    # -- images --------------------------------------------------------------------------------
    def image_exists(self, reference: str) -> bool:
        """Whether the service has the image."""
        with self._client(f"looking for the image {reference}") as client:
            return bool(client.images.exists(reference))

    def pull(self, reference: str) -> None:
        """Pull an image from its registry.

        ImageNotFoundError: the registry has no such image; PermissionError: it denies access; OSError (EHOSTUNREACH):
        it cannot be reached; OSError (EINVAL): `reference` is not an image name; other OSErrors.
        """
        with self._client(f"pulling {reference}", timeout_s=_PULL_TIMEOUT_S) as client:
            # As a stream, because podman-py ignores the errors in it otherwise.  Without "tlsVerify", which podman-py
            # would send as true, and which overrides registries.conf(5).
            try:
                lines = client.images.pull(reference, stream=True, decode=True, compatMode=False, tls_verify=None)
                replies: list[object] = [*lines] if isinstance(lines, Iterator) else []
            except APIError as error:
                raise pull_error(reference, str(error.explanation or error), self.address) from None
        errors = [str(line["error"]) for line in replies if isinstance(line, dict) and line.get("error")]
        if errors:
            raise pull_error(reference, errors[-1], self.address)


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a service.  The id identifies it, even if another container takes over its name."""

    service: PodmanService
    id: str
    name: str

    def inspect(self) -> ContainerState:
        """The current state.  ContainerNotFoundError after the container was removed."""
        return self.service.inspect(self.id)

    def start(self) -> None:
        """Start the container; a no-op if it is running."""
        self._call("starting", lambda one: one.start())

    def kill(self) -> None:
        self._call("killing", lambda one: one.kill("SIGKILL"))

    def remove(self) -> None:
        """Kill the container and remove it with its anonymous volumes; a no-op if it is gone."""
        with contextlib.suppress(OSError):  # not running
            self.kill()  # `remove` alone would first send SIGTERM and wait ten seconds
        pauses_s = iter(_REMOVAL_PAUSES_S)
        while True:
            try:
                self._call("removing", lambda one: one.remove(v=True, force=True))
            except ContainerNotFoundError:
                return
            except OSError as error:
                pause_s = next(pauses_s, None)
                if pause_s is None or "resource busy" not in str(error):
                    raise
                time.sleep(pause_s)
            else:
                return

    def _call(self, doing: str, action: Callable[[Any], object]) -> None:
        self.service.call(f"{doing} the container {self.name}", self.id, action)


def _open_socket(address: ServiceAddress) -> socket.socket:
    if address.kind == "tcp":
        return socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(address.path)
    except BaseException:
        client.close()
        raise
    return client
