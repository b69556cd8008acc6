"""Forms: the fields of a POST, checked, and the outcomes that the page shows after it.

Threading: the event loop.  No await between two accesses of `Outcomes`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import parse_qsl

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from vfsd.web.access import Credentials
from vfsd.web.problems import WrongRequestError

_BODY_BYTES: Final = 64 * 1024
_BODY_S: Final = 30
_FIELDS: Final = 50
_KEPT: Final = 64
_MEDIA_TYPE: Final = "application/x-www-form-urlencoded"


async def fields(request: Request) -> Mapping[str, str]:
    """Return the fields of a form that this server sent.  HTTPException (403) without its token."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _MEDIA_TYPE:
        raise HTTPException(415, f"A change is a form: {_MEDIA_TYPE}.")
    try:
        with anyio.fail_after(_BODY_S):
            body = await _body(request)
    except TimeoutError:
        raise HTTPException(408, "The form did not arrive completely.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The browser left before the form had arrived.") from None
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FIELDS)
    except ValueError:
        raise WrongRequestError("The form is not readable.") from None
    found = {name: value.replace("\r\n", "\n") for name, value in pairs}
    credentials: Credentials = request.app.state.credentials
    if not credentials.is_form_token(found.get("form_token", "")):
        raise HTTPException(403, "The form is of another run of `vfsd web`: go back, reload the page, and try again.")
    return found


async def _body(request: Request) -> bytes:
    body = b""
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > _BODY_BYTES:
                raise HTTPException(413, "The form is too long.")
    return body


class Outcomes:
    """The results of the last changes, which the page that follows a change shows.

    A change is answered with a redirect to its outcome, so that reloading that page does not repeat the change.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def keep(self, outcome: Mapping[str, Any]) -> str:
        """Keep an outcome, and return its name.  The oldest ones are dropped."""
        name = secrets.token_urlsafe(8)
        self._kept[name] = outcome
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return name

    def find(self, name: str) -> Mapping[str, Any] | None:
        """Return an outcome; None if it was dropped."""
        return self._kept.get(name)
