"""Errors of pulling an image, from the text that Podman reports.

Podman's API reports every failed pull as one line of text (containers/image wraps the errors of Go's net package and of
the registry: distribution-spec, "Error Codes"), so the text is all there is to tell the causes apart.
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["ImageNotFoundError", "pull_error"]

# In this order: a registry that denies access may also say "not found", and was reached.
_DENIED: Final = ("unauthorized", "authentication required", "access denied", "denied:", "is denied", "403 (forbidden)",
                  "invalid username/password")  # fmt: skip
_MISSING: Final = ("manifest unknown", "name unknown", "repository name not known", "404 (not found)",
                   "did not resolve to an alias", "no such image")  # fmt: skip
_UNREACHABLE: Final = ("dial tcp", "pinging container registry", "i/o timeout", "no such host", "tls:", "x509:",
                       "connection refused", "connection reset", "network is unreachable")  # fmt: skip
_INVALID: Final = ("invalid reference format", "invalid image reference")


class ImageNotFoundError(FileNotFoundError):
    """There is no image of that name, here or at its registry (ENOENT)."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(errno.ENOENT, f"no such image: {reason}", reference)


def pull_error(reference: str, said: str) -> OSError:
    """The error for a pull of `reference` that failed with the text `said`."""
    text = said.lower()
    if any(words in text for words in _INVALID):
        return OSError(errno.EINVAL, f"not the name of an image: {said}", reference)
    if any(words in text for words in _DENIED):
        advice = "log in with podman login; many registries answer so also for an image that does not exist"
        return PermissionError(errno.EACCES, f"the registry denies access ({advice}): {said}", reference)
    if any(words in text for words in _MISSING):
        return ImageNotFoundError(reference, said)
    if any(words in text for words in _UNREACHABLE):
        advice = "check the registry's name and the network; podman images lists the images that are here"
        return OSError(errno.EHOSTUNREACH, f"the image's registry cannot be reached ({advice}): {said}", reference)
    return OSError(errno.EIO, f"the image cannot be pulled: {said}", reference)
