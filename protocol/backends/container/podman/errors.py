"""OSErrors with advice for what goes wrong with a Podman service.

Podman's API reports every failed pull as one line of text (containers/image wraps the errors of Go's net package and of
the registry: distribution-spec, "Error Codes"), so only the text distinguishes the causes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from podman.errors import APIError, PodmanError
from requests import RequestException

from protocol.backends.container.podman import advice
from protocol.backends.container.podman.address import ServiceAddress

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
        lists = f"`{advice.podman(service)} ps -a` lists them"
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
            reason += advice.start(address)
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
    other = advice.other_service(address)
    own = f", or {other} to use your own" if other else ""
    reason = {
        errno.ENOENT: f"no Podman service is there; start one: {advice.start(address)}{own}",
        errno.ECONNREFUSED: f"no Podman service listens there; start it: {advice.start(address)}{own}",
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
        what = f"check the registry's name and the network; `{advice.podman(address)} images` lists the local images"
        return OSError(errno.EHOSTUNREACH, f"the image's registry cannot be reached ({what}): {reason}", reference)
    return OSError(errno.EIO, f"the image cannot be pulled: {reason}", reference)
