"""Access: who may use the page, and the security headers of every answer.

A request is refused unless it passes each of these checks:

- Host is the address that the server listens at, so a foreign name that resolves to 127.0.0.1 gets nothing (DNS
  rebinding).
- Origin, if the browser sends it, is the server's own.  A request that may change something must have it, unless it
  brings the token in the header Authorization.
- Sec-Fetch-Site, if the browser sends it, is of the server's own pages or of the user (the address bar).  A page of
  another port of this host counts as the same site, so SameSite cookies go with its requests.
- The token is in a cookie (HttpOnly, SameSite=Strict) or in "Authorization: Bearer TOKEN".  `/?token=TOKEN` sets the
  cookie and leads to the first page, with `&source=KEY` to that of a workspace.  So does `/?ticket=TICKET`, once: the
  command line of a browser that `vfsd web --open` starts can be read by other users.

Forms carry a second token (`Credentials.form_token`), which `vfsd.web.actions` checks.

The policy of the pages allows scripts, styles and images of this server only, and none inside of a page.  Answers that
carry content of a workspace set a stricter one themselves (`CONTENT_HEADERS`).

Threading: the event loop.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
# "same-origin", not "no-referrer", with which browsers send "Origin: null" with a form.
_HEADERS: Final = {
    "content-security-policy": _PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Of answers with bytes of a workspace: a browser saves them, and would run nothing in them if it opened them.
CONTENT_HEADERS: Final = {"content-security-policy": "default-src 'none'; sandbox", "content-disposition": "attachment"}
_SAFE_METHODS: Final = ("GET", "HEAD")
_OTHER_PAGES: Final = ("cross-site", "same-site")
_REFUSED: Final = "Requests of other pages are refused: open the URL that `vfsd web` printed.\n"
# The browser repeats the request for "/" from this page.  A redirect would not do: it belongs to the navigation that
# began on another page if the user clicked the URL there, and then SameSite=Strict withholds the cookie.
_WELCOME: Final = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}">'
    '<title>vfsd</title><p><a href="{0}">Continue</a></html>'
)


class Credentials:
    """The token of one server, the token of its forms, which is derived from it, and tickets."""

    def __init__(self, token: str | None = None) -> None:
        """None makes a new token that nobody can guess."""
        self.token: Final = token or secrets.token_urlsafe(32)
        self.form_token: Final = hmac.new(self.token.encode(), b"form", hashlib.sha256).hexdigest()
        self._tickets: set[str] = set()

    def new_ticket(self) -> str:
        """Make a ticket that can be used in place of the token once."""
        ticket = secrets.token_urlsafe(32)
        self._tickets.add(ticket)
        return ticket

    def use_ticket(self, given: str) -> bool:
        """Return whether `given` is a ticket that nobody has used yet, and mark it as used."""
        if given not in self._tickets:
            return False
        self._tickets.remove(given)
        return True

    def is_form_token(self, given: str) -> bool:
        """Whether `given` is the token of the forms, in constant time."""
        return hmac.compare_digest(given.encode(), self.form_token.encode())

    def is_token(self, given: str) -> bool:
        """Whether `given` is the token, in constant time."""
        return hmac.compare_digest(given.encode(), self.token.encode())


class Access:
    """An ASGI application: `inner` for requests that may use the page.  It does not read their bodies."""

    def __init__(self, inner: ASGIApp, credentials: Credentials, port: int) -> None:
        self._inner = inner
        self._credentials = credentials
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        # Cookies are shared by all ports of a host: several servers must not overwrite each other's.
        self.cookie: Final = f"vfsd-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope)
        await (self._inner if answer is None else answer)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the answer to a request that `inner` must not see."""
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return PlainTextResponse("This server answers at its loopback address only.\n", 421)
        origins = headers.getlist("origin")
        if origins and origins not in [[f"http://{host}"] for host in self._hosts]:
            return PlainTextResponse(_REFUSED, 403)
        is_safe = scope["method"] in _SAFE_METHODS
        if self._has_bearer(headers):
            return None
        if is_safe and scope["path"] == "/":
            query = QueryParams(scope["query_string"])
            has_ticket = scope["method"] == "GET" and self._credentials.use_ticket(query.get("ticket", ""))
            if has_ticket or self._credentials.is_token(query.get("token", "")):
                return self._welcome(query.get("source"))
        if headers.get("sec-fetch-site") in _OTHER_PAGES:
            return PlainTextResponse(_REFUSED, 403)
        if not self._has_cookie(headers):
            text = "This page needs its token: open the URL that `vfsd web` printed.\n"
            return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})
        if not is_safe and not origins:
            return PlainTextResponse("A change needs the header Origin.\n", 403)
        return None

    def _welcome(self, source: str | None) -> Response:
        # No page learns this URL, which has the token.
        headers = {"referrer-policy": "no-referrer"}
        answer = HTMLResponse(_WELCOME.format(f"/w/{quote(source, safe='')}/" if source else "/"), headers=headers)
        answer.set_cookie(self.cookie, self._credentials.token, path="/", httponly=True, samesite="strict")
        return answer

    def _has_bearer(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._credentials.is_token(token.strip())

    def _has_cookie(self, headers: Headers) -> bool:
        pairs = [pair.strip().partition("=") for pair in headers.get("cookie", "").split(";")]
        return any(name == self.cookie and self._credentials.is_token(value) for name, _, value in pairs)
