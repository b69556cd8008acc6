"""The page on a real server and real mounts: in a thread of this process, with a client that behaves like a browser."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
import trio

from tests.mount.conftest import mounted
from vfsd.client.workspace import Workspace
from vfsd.web import pages, server
from vfsd.web.access import Credentials
from vfsd.web.server import application
from vfsd.web.sources import Sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.fuse)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def words(self) -> str:
        """The text of the page without tags, with single spaces."""
        return " ".join(re.sub(r"<[^>]*>", " ", self.text.partition("<main>")[2].partition("</main>")[0]).split())


@dataclass
class Site:
    """A server, and requests to it with the token's cookie and the headers of its own pages."""

    port: int
    credentials: Credentials
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.headers = {"cookie": f"vfsd-{self.port}={self.credentials.token}"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def entrance(self) -> str:
        return f"{self.url}/?token={self.credentials.token}"

    def request(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, self.headers if headers is None else headers)
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str, /, **query: str) -> Answer:
        return self.request("GET", path + (f"?{urlencode(query)}" if query else ""))

    def post(self, path: str, /, **fields: str) -> Answer:
        """Send a form as the page would, and follow the redirect."""
        headers = {**self.headers, "origin": self.url, "content-type": "application/x-www-form-urlencoded"}
        body = urlencode({"form_token": self.credentials.form_token, **fields}).encode()
        answer = self.request("POST", path, headers, body)
        return self.get(answer.headers["location"]) if answer.status == 303 else answer

    def form(self, path: str, /, **query: str) -> dict[str, str]:
        """The hidden fields of the last form on a page."""
        last = self.get(path, **query).text.rpartition('<form method="post"')[2]
        return dict(re.findall(r'name="(\w+)" value="([^"]*)"', last))


@contextmanager
def serving(*archives: str) -> Iterator[Site]:
    credentials = Credentials()
    ended = trio.Event()
    tokens: list[trio.lowlevel.TrioToken] = []
    with Sources(archives) as sources, server.listening(0) as sock:
        port = sock.getsockname()[1]
        app = application(sources, credentials, port)

        async def wait_ended() -> None:
            tokens.append(trio.lowlevel.current_trio_token())
            await ended.wait()

        thread = threading.Thread(target=lambda: trio.run(server.serve, app, sock, wait_ended))
        thread.start()
        try:
            yield Site(port, credentials)
        finally:
            tokens[0].run_sync_soon(ended.set)
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages wait for what they count, however busy the machine is."""
    monkeypatch.setattr(pages, "SOON_S", 60.0)


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


@pytest.fixture
def workspace(workdir: Path) -> Iterator[Workspace]:
    # A page that is still open may ask during the unmount; the kernel has written everything back by then.
    with mounted(workdir / "m", may_say="syncfs failed: not mounted here any more", name="demo") as found:
        yield found


@pytest.fixture
def story(workspace: Workspace, root: Path) -> None:
    """Two snapshots: "one" with a.txt and gone, "two" with a.txt changed, gone removed and src/new added."""
    (root / "a.txt").write_text("first\nsecond\nthird\n")
    (root / "gone").write_text("x")
    workspace.snapshot("one", tag="before")
    (root / "a.txt").write_text("first\nSECOND\nthird\nfourth\n")
    (root / "gone").unlink()
    (root / "src").mkdir()
    (root / "src/new").write_text("new")
    workspace.snapshot("two")
