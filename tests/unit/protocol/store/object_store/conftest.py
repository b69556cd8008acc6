"""A local store, a directory, and remote stores on a real S3 server, by the protocol of gs://, and in a directory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage, upkeep
from tests.support.gcs_server import GcsProxy, gcs_options
from tests.support.s3_server import BUCKET, options, s3_server

PREFIXES = itertools.count()
Open = Callable[..., RemoteStore]


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "local") as store:
        yield store


@pytest.fixture(params=["s3", "gs", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, s3_port: int) -> Iterator[Open]:
    """Opens one remote store, each time as another machine would: without cached indexes.

    The server is started also for a directory: a session's fixture that begins during a test looks like a leak of it.
    """
    url, given = f"{request.param}://{BUCKET}/test-{next(PREFIXES)}", options(s3_port)
    with ExitStack() as stack:
        if request.param == "file":
            url, given = f"file://{tmp_path}/remote", {}
        elif request.param == "gs":
            given = gcs_options(stack.enter_context(GcsProxy(s3_port)).port)

        def opened(*, patience_s: float = 30.0, grace_s: float = 3600.0) -> RemoteStore:
            storage = open_storage(url, given, patience_s=patience_s)
            return stack.enter_context(RemoteStore(storage, grace_s=grace_s))

        yield opened


def taken(local: Store, name: str, root: Path) -> None:
    local.take("host:/w", name, DirectorySource(root))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a remote store in a directory."""
    monkeypatch.setattr(upkeep, "_CLOCK_ERROR_S", 0.0)
    return f"file://{tmp_path}/remote"
