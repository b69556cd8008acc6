"""PodmanService and Container: the life cycle of containers, through Podman's own client.

podman-py creates, starts, inspects and removes containers.  vfsd does itself what podman-py lacks: streams to a running
command (podman-py ignores `exec_run(socket=True)`) and an ssh tunnel that checks host keys (`Tunnel`).  Through the
tunnel every service is a socket to the rest of vfsd (`connect`).

Threading: every method blocks, and any thread may call it.  Each call creates a client of its own, so threads share
nothing, and a restart of the service between two calls does no harm.

The errors are OSErrors with advice.  Podman's API reports every failed pull as one line of text (containers/image wraps
the errors of Go's net package and of the registry: distribution-spec, "Error Codes"), so only the text distinguishes
the causes.

`Tunnel` is a local socket for a service on another machine, forwarded by the user's own ssh.  Podman's client can
forward too, but it makes ssh accept any host key (StrictHostKeyChecking=no), and starts an ssh for each client.  This
ssh never asks on a terminal: keys come from the agent or from ssh_config(5).
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from podman import PodmanClient
from podman.errors import APIError, PodmanError
from requests import RequestException

from protocol.backends.container.podman.address import (
    ServiceAddress,
    default_address,
    other_service_advice,
    parse_address,
    podman_command,
    start_advice,
)
from protocol.backends.container.podman.spec import (
    ContainerSpec,
    ContainerState,
    own_hard_limits,
    permitted_ulimits,
    state_of,
)

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


_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
# In this order: a registry that denies access may also say "not found", and was reached.
_DENIED: Final = ("unauthorized", "authentication required", "access denied", "denied:", "is denied", "403 (forbidden)",
                  "invalid username/password")  # fmt: skip
_MISSING: Final = ("manifest unknown", "name unknown", "repository name not known", "404 (not found)",
                   "did not resolve to an alias", "no such image")  # fmt: skip
_UNREACHABLE: Final = ("dial tcp", "pinging container registry", "i/o timeout", "no such host", "tls:", "x509:",
                       "connection refused", "connection reset", "network is unreachable")  # fmt: skip
_INVALID: Final = ("invalid reference format", "invalid image reference")


class ContainerNotFoundError(FileNotFoundError):
    """No container has that name (ENOENT)."""

    def __init__(self, name: str, service: ServiceAddress) -> None:
        lists = f"`{podman_command(service)} ps -a` lists them"
        super().__init__(errno.ENOENT, f"no container of that name at {service}; {lists}", name)


class ImageNotFoundError(FileNotFoundError):
    """No image has that name, neither locally nor at its registry (ENOENT)."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(errno.ENOENT, f"no such image: {reason}", reference)


@contextlib.contextmanager
def podman_errors(doing: str, address: ServiceAddress) -> Iterator[None]:
    """Translate the errors of Podman's client; `doing` says what was attempted."""
    try:
        yield
    except APIError as error:
        if error.status_code:
            raise _refusal(doing, error) from None
        # The service accepted the connection and closed it without an answer.
        reason = "the Podman service closed the connection without an answer"
        if address.kind == "ssh":  # ssh accepts here, and then finds no socket there
            reason = f"no Podman service answers at {address.path} on {address.host}; start it there: "
            reason += start_advice(address)
        raise OSError(_root_errno(error) or errno.ECONNRESET, f"{doing}: {reason}", address.url) from None
    except (RequestException, PodmanError) as error:
        raise OSError(_root_errno(error) or errno.EIO, f"{doing}: {error}", address.url) from None


def is_not_found(error: APIError) -> bool:
    """Whether the service answered that it does not have the thing."""
    return error.status_code is not None and int(error.status_code) == _NOT_FOUND


def _refusal(doing: str, error: APIError) -> OSError:
    """The error for a request that the service refused, with the service's text."""
    said = str(error.explanation or error)
    code = {_NOT_FOUND: errno.ENOENT, _CONFLICT: errno.EBUSY}.get(int(error.status_code or 0), errno.EIO)
    if "is already in use" in said:
        code = errno.EEXIST
    if "executable file" in said or ("no such file or directory" in said and "exec" in said):
        said += " (the image lacks /bin/sh, which keeps a container of vfsd's alive; use one that has it)"
    return OSError(code, f"{doing}: {said}")


def connect_error(error: OSError, address: ServiceAddress) -> OSError:
    """The error for a service that cannot be connected to."""
    if address.kind == "ssh":  # what ssh said
        return OSError(error.errno or errno.EIO, _unreachable(error), address.url)
    if isinstance(error, socket.gaierror):  # whose errno is none of errno(3)
        return OSError(errno.EHOSTUNREACH, f"{_unreachable(error)}; check the name of the host", address.url)
    code = error.errno or errno.EIO
    other = other_service_advice(address)
    own = f", or {other} to use your own" if other else ""
    reason = {
        errno.ENOENT: f"no Podman service is there; start one: {start_advice(address)}{own}",
        errno.ECONNREFUSED: f"no Podman service listens there; start it: {start_advice(address)}{own}",
        errno.EACCES: f"the Podman service there belongs to another user{own.replace(', or', ';')}",
    }.get(code, _unreachable(error))
    return OSError(code, reason, address.url)


def _unreachable(error: OSError) -> str:
    return f"the Podman service cannot be reached: {error.strerror or error}"


def _root_errno(error: BaseException) -> int | None:
    """The errno of the innermost error; urllib3 and requests wrap it several times."""
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        one = pending.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, TimeoutError):
            return errno.ETIMEDOUT
        if isinstance(one, OSError) and one.errno:
            return one.errno
        pending += [*one.args, one.__cause__, one.__context__, getattr(one, "reason", None)]
    return None


def pull_error(reference: str, reason: str, address: ServiceAddress) -> OSError:
    """The error for a pull of the image `reference` that failed with the text `reason`."""
    text = reason.lower()
    if any(words in text for words in _INVALID):
        return OSError(errno.EINVAL, f"not the name of an image: {reason}", reference)
    if any(words in text for words in _DENIED):
        what = "log in with podman login; many registries answer so also for an image that does not exist"
        return PermissionError(errno.EACCES, f"the registry denies access ({what}): {reason}", reference)
    if any(words in text for words in _MISSING):
        return ImageNotFoundError(reference, reason)
    if any(words in text for words in _UNREACHABLE):
        what = f"check the registry's name and the network; `{podman_command(address)} images` lists the local images"
        return OSError(errno.EHOSTUNREACH, f"the image's registry cannot be reached ({what}): {reason}", reference)
    return OSError(errno.EIO, f"the image cannot be pulled: {reason}", reference)


_CONNECT_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05  # ssh does not report when it has created the socket
_OPTIONS: Final = ("BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=15", "ServerAliveCountMax=3")


class Tunnel:
    """An ssh process that forwards the socket at `path` to the service at `address`.  OSError if it fails."""

    def __init__(self, address: ServiceAddress) -> None:
        self._directory = tempfile.mkdtemp(prefix="vfsd-podman-")
        self.path: Final = os.path.join(self._directory, "podman.sock")
        options = [word for option in _OPTIONS for word in ("-o", option)]
        port = ["-p", str(address.port)] if address.port else []
        command = ["ssh", "-N", "-T", *options, *port, "-L", f"{self.path}:{address.path}", "--", address.host]
        try:
            self._ssh = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        try:
            self._wait_for_socket(address)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._ssh.poll() is None

    def close(self) -> None:
        """End ssh and the connections through it."""
        self._ssh.terminate()
        try:
            self._ssh.wait(5)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        if self._ssh.stderr is not None:
            self._ssh.stderr.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_for_socket(self, address: ServiceAddress) -> None:
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._answers():
            if not self.alive:
                raise OSError(errno.ECONNREFUSED, f"ssh: {self._last_words()}", address.url)
            if time.monotonic() > deadline_s:
                raise OSError(errno.ETIMEDOUT, "ssh does not connect in time", address.url)
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return not probe.connect_ex(self.path)

    def _last_words(self) -> str:
        assert self._ssh.stderr is not None
        poll = select.poll()
        poll.register(self._ssh.stderr, select.POLLIN)
        lines = self._ssh.stderr.read().decode("utf-8", "replace").splitlines() if poll.poll(1000) else []
        return lines[-1] if lines else f"ended with status {self._ssh.returncode}"


DEFAULT_WORKDIR: Final = "/workspace"


@dataclass(frozen=True, slots=True)
class ContainerTarget:
    """The directory `workdir` of a container.

    Each call asks the service for `name`: a name, so that a container that was removed and created again is found, or
    the id of a container of vfsd's own.
    """

    service: PodmanService
    name: str
    workdir: str = DEFAULT_WORKDIR

    def inspect(self) -> ContainerState:
        """The container's current state.  ContainerNotFoundError."""
        return self.service.inspect(self.name)

    # -- `protocol.backends.container.connection.Target` ---------------------------------------------------
    @property
    def label(self) -> str:
        return f"container {self.name}"

    @property
    def no_answer(self) -> str:
        return f"Podman does not answer at {self.service.address}"

    def check(self) -> ContainerState:
        state = self.inspect()
        if not state.running:
            start = f"{podman_command(self.service.address)} start {state.name}"
            raise OSError(errno.EIO, f"the container is not running ({state.describe()}): {start}")
        return state

    def describe(self) -> str:
        try:
            return self.inspect().describe()
        except ContainerNotFoundError:
            return "removed"

    def advice(self, reason: str) -> str:  # noqa: ARG002 (Podman's answer says more)
        try:
            self.check()
        except ContainerNotFoundError:
            return f"the container {self.name} was removed: `vfsd unmount`, or create it again under this name"
        return "the container is running, but is not connected yet: try again"

    def container(self) -> Container:
        """A handle of the current container.  ContainerNotFoundError."""
        return self.service.container(self.name)


def check_workdir(workdir: str) -> str:
    """Normalise `workdir`.  ValueError if it is not absolute or contains ".."."""
    if not workdir.startswith("/") or "\0" in workdir or ".." in workdir.split("/"):
        raise ValueError(f"the working directory must be an absolute path in the container, without ..: {workdir!r}")
    return "/" + posixpath.normpath(workdir).lstrip("/")
