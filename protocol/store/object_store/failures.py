"""Failures of requests to an object store: which may pass, and what the caller is told about the others.

`obstore` reports most failures as one kind of error, with the server's answer in its text.  So this module reads the
text.  A text that is not known means a failure that may pass.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from typing import Final

_CREDENTIALS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CREDENTIALS: Final = re.compile(
    r"credential|169\.254\.169\.254|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
    re.IGNORECASE,
)
_NO_HTTP: Final = re.compile(r"builder error|URL scheme is not allowed|is not https|future panicked", re.IGNORECASE)
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)
_REASONS: Final = (
    (
        re.compile(r"incorrectly configured region|AuthorizationHeaderMalformed|PermanentRedirect"),
        (errno.EINVAL, "the bucket is in another region: set AWS_REGION, or --store-option region="),
    ),
    (
        re.compile("RequestTimeTooSkewed"),
        (errno.EACCES, "the clock of this machine differs from that of the store: correct it"),
    ),
    (
        re.compile(rf"KeyTooLong|\(os error {errno.ENAMETOOLONG}\)"),
        (errno.ENAMETOOLONG, "the name is too long for this store: choose a shorter one"),
    ),
)
_STATUS: Final = re.compile(r"status code: (\d{3}) ([A-Z][A-Za-z ]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
# What an error says of the object, which must not be taken for a reason: keys may have any name.
_KEYS: Final = re.compile(r"(?<=://)([^/\s]+)/\S*|(?<=for path )\S+|(?<=at location )\S+|(?<=path: )\S+")
_ERRNO: Final = re.compile(r"\(os error (\d+)\)")  # how a store in a directory reports a failed system call
_FINAL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR})
# Answers that may differ when the request is repeated: too slow, concurrent changes, too early, too many requests.
_PASSING_STATUS: Final = frozenset({"408", "409", "412", "425", "429"})
_SLOW: Final = "RequestTimeout"  # S3 answers this with status 400
_FINAL_STATUS: Final = frozenset({"501", "505"})
# No server was reached.
_UNREACHABLE: Final = (
    (re.compile("ConnectionRefused|Connection refused"), "connection refused"),
    (re.compile("dns error"), "the host is unknown"),
    (re.compile("NetworkUnreachable|HostUnreachable|Network is unreachable|No route to host"), "no route to the host"),
    (re.compile("invalid peer certificate|certificate"), "the certificate is not trusted"),
)
_NO_ANSWER: Final = (
    *_UNREACHABLE,
    (re.compile("TimedOut|timed out|Timeout"), "time-out"),
    (re.compile("ConnectionReset|Connection reset|IncompleteMessage"), "the connection was lost"),
)


def final_error(url: str, key: str, error: Exception) -> OSError | None:
    """The error for the caller of a request for `key` of the store at `url`; None for a failure that may pass."""
    import obstore.exceptions as known  # noqa: PLC0415 an optional dependency

    text = _KEYS.sub(r"\1", str(error))
    if _NO_BUCKET.search(text):
        return OSError(errno.ENOENT, "there is no such bucket: create it, or correct the name", url)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object", f"{url}/{key}")
    for pattern, failure in _REASONS:
        if pattern.search(text):
            return OSError(*failure, url)
    status, reason = _status(text)
    if isinstance(error, known.UnauthenticatedError) or status == "401" or _NO_CREDENTIALS.search(text):
        advice = _CREDENTIALS.get(url.partition("://")[0], "set them in the environment")
        return OSError(errno.EACCES, f"no credentials that the store accepts: {advice}", url)
    if isinstance(error, (known.PermissionDeniedError, PermissionError)) or status == "403":
        return OSError(errno.EACCES, "access denied: the credentials do not permit this", url)
    if _NO_HTTP.search(text):
        advice = "cannot use this endpoint: check its URL; one without TLS needs --store-option allow_http=true"
        return OSError(errno.EINVAL, advice, url)
    if isinstance(error, (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)):
        return OSError(errno.EINVAL, f"the store refuses the request ({first_line(error)})", url)
    if status in _FINAL_STATUS or (status.startswith("4") and status not in _PASSING_STATUS and reason != _SLOW):
        what = f"{reason or 'status'} {status}".strip()
        return OSError(errno.EINVAL, f"the store refuses the request ({what}): check its URL and endpoint", url)
    number = error.errno if isinstance(error, OSError) else None
    found = _ERRNO.search(text)
    if found is not None:
        number = int(found[1])
    if number in _FINAL_ERRNOS:
        return OSError(number, os.strerror(number), url)
    return None


def _status(text: str) -> tuple[str, str]:
    """The status of the server's answer, and its code in words; empty if there was no answer."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is None:
        return "", ""
    return status[1], code[1] if code is not None else status[2].strip()


def cause_of(error: Exception) -> str:
    """Why a request failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "time-out"
    text = _KEYS.sub(r"\1", str(error))
    status, reason = _status(text)
    if status:
        return f"{status} {reason}"
    host = re.search(r"https?://[^/\s,]+", text)
    cause = _found(_NO_ANSWER, text)
    if cause is None:
        return first_line(error).rpartition(" - ")[2]
    return f"{host[0]}: {cause}" if host is not None else cause


def is_unreachable(error: Exception) -> bool:
    """Whether a request failed because there was no connection to a server that is trusted."""
    return _found(_UNREACHABLE, _KEYS.sub(r"\1", str(error))) is not None


def has_answered(error: Exception) -> bool:
    """Whether a request failed with an answer of the server."""
    text = _KEYS.sub(r"\1", str(error))
    return bool(_status(text)[0]) or not (isinstance(error, TimeoutError) or _found(_NO_ANSWER, text))


def _found(causes: Sequence[tuple[re.Pattern[str], str]], text: str) -> str | None:
    return next((cause for pattern, cause in causes if pattern.search(text)), None)


def first_line(error: Exception) -> str:
    """The first line of a message of `obstore`, which continues with internal details."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
