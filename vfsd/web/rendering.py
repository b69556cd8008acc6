"""Rendering: the templates, how names, sizes and times look on a page, and the answer to a request that failed.

Jinja2 escapes every value.  File names and contents can have characters that hide or reorder text; the filters `name`
and `visible` show them as escapes.

An error is a status of HTTP, a sentence, and advice.  No answer contains a traceback.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from datetime import datetime
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import vfsd
from vfsd.client.connection import ControlError
from vfsd.machine.text import LETTERS, count_words, counted, human_size, link_note, show_path
from vfsd.web.access import Credentials
from vfsd.wire.messages import wire_path

# Controls other than tab and newline, and what changes the direction of text (Unicode Standard Annex 9).
_HIDDEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Show the control characters in the content of a file, other than tab and newline, as escapes."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\r\n", "\n"))


def href(key: str, page: str, **query: object) -> str:
    """Return the URL of a page of the source `key`.  Members of `query` that are None are left out."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return f"/w/{quote(key)}/{page}" + (f"?{urlencode(given)}" if given else "")


def api(page: str, **query: object) -> str:
    """Return the URL of a route of the API."""
    return f"/api/filesystem/{page}?" + urlencode({name: str(v) for name, v in query.items() if v is not None})


def local_time(when: datetime | str) -> str:
    """Format a time in the time zone of this machine."""
    found = datetime.fromisoformat(when) if isinstance(when, str) else when
    return found.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def crumbs(path: str) -> list[tuple[str, str]]:
    """Return the name and the path of each directory that leads to `path`, and of `path` itself."""
    names = path.split("/") if path else []
    return [(name, "/".join(names[: at + 1])) for at, name in enumerate(names)]


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("vfsd.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(name=show_path, visible=visible, size=human_size, time=local_time)
    made.filters["link_note"] = lambda change: link_note(change.linked_to, change.unlinked_from)
    made.filters["path"] = lambda path: show_path(wire_path(os.fsencode(path)))
    made.globals.update(href=href, api=api, counted=counted, count_words=count_words, letters=LETTERS, crumbs=crumbs)
    made.globals["version"] = vfsd.__version__
    return made


def page(request: Request, template: str, code: int = 200, **values: Any) -> HTMLResponse:
    """Render a template as the answer to `request`, with the status `code`."""
    credentials: Credentials = request.app.state.credentials
    common = {"source": None, "form_token": credentials.form_token, "live": None, "up": None}
    text = _environment().get_template(template).render({**common, **values})
    return HTMLResponse(text, code)


_logger = logging.getLogger(__name__)
# -- problems --------------------------------------------------------------------------------------
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


class Problem(msgspec.Struct):
    """A request that failed."""

    message: str
    errno: str | None


class ProblemDocument(msgspec.Struct):
    """The answer of the API to such a request."""

    error: Problem


class WrongRequestError(ValueError):
    """A request that the page itself would not send.  The message is a sentence."""


async def answer_problem(request: Request, error: Exception) -> Response:
    """Answer a request that failed: JSON for the API, a page for a browser."""
    status, message = described(error)
    if request.url.path.startswith("/api/"):
        number = getattr(error, "errno", None)
        document = ProblemDocument(Problem(message, errno.errorcode.get(number or 0)))
        return Response(msgspec.json.encode(document), status, media_type="application/json")
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
