"""Problems: an error as a status of HTTP, a sentence, and advice.  No answer contains a traceback."""

from __future__ import annotations

import errno
import logging
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vfsd.client.connection import ControlError
from vfsd.machine.text import show_path
from vfsd.web.rendering import page

_logger = logging.getLogger(__name__)
_STATUSES: Final = {
    errno.ENOENT: 404,
    errno.EEXIST: 409,
    errno.EBUSY: 409,
    errno.ENOTEMPTY: 409,
    errno.EACCES: 403,
    errno.EPERM: 403,
    errno.EROFS: 403,
    errno.ENOSPC: 507,
    errno.EOPNOTSUPP: 409,
    errno.ESTALE: 409,
    errno.ETIMEDOUT: 504,
    errno.EIO: 502,
}
_GONE: Final = "The workspace has ended, or its daemon died."


class WrongRequestError(ValueError):
    """A request that the page itself would not send.  The message is a sentence."""


async def answer(request: Request, error: Exception) -> Response:
    """Answer a request that failed: JSON for the API, a page for a browser."""
    status, message = described(error)
    if request.url.path.startswith("/api/"):
        number = getattr(error, "errno", None)
        document = {"message": message, "errno": errno.errorcode.get(number or 0)}
        return JSONResponse({"error": document}, status)
    return page(request, "problem.html", status, message=message, key=request.path_params.get("key"))


def described(error: Exception) -> tuple[int, str]:
    """Return the status and the message for an error.  Logs an error that is a bug."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail
    if isinstance(error, WrongRequestError):
        return 400, str(error)
    if isinstance(error, ControlError):
        return _STATUSES.get(error.errno or 0, 400), show_path(str(error))
    if isinstance(error, TimeoutError):
        return 504, "The daemon does not answer.  It may be busy or stopped; try again."
    if isinstance(error, ConnectionError):
        return 503, f"{_GONE}  ({show_path(_words(error))})"
    if isinstance(error, OSError):
        return _STATUSES.get(error.errno or 0, 400), show_path(_words(error))
    if isinstance(error, ValueError):
        return 400, show_path(ascii_safe(str(error)))
    _logger.error("a request failed", exc_info=error)
    return 500, "This is a bug in vfsd; the terminal of `vfsd web` shows the details."


def _words(error: OSError) -> str:
    text = error.strerror or str(error)
    return ascii_safe(f"{text}: {error.filename}" if error.filename else text)


def ascii_safe(text: str) -> str:
    """Escape what UTF-8 cannot encode, the bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
