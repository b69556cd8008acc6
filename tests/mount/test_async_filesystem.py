"""`AsyncWorkspace.async_filesystem` on asyncio and on trio: the filesystem suites, driven through a portal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from protocol import SnapshotableFilesystem
from protocol.streams import STREAM_CHUNK_BYTES
from protocol.testing import ArchiveContract, FilesystemContract, SnapshotContract, StreamingContract
from tests.mount.conftest import mounted
from vfsd.client.async_workspace import AsyncFilesystem, AsyncWorkspace


class Portal:
    """Calls coroutine functions on a loop that runs in another thread."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def call() -> Any:
            return await function(*args, **kwargs)

        return self._portal.call(call)

    def iterate(self, items: Any) -> Iterator[Any]:
        """Yield the items of an async iterator."""

        async def following() -> list[Any]:
            async for item in items:
                return [item]
            return []

        while found := self._portal.call(following):
            yield found[0]


class Blocking:
    """A `SnapshotableFilesystem` that makes each call on the async twin."""

    def __init__(self, files: AsyncFilesystem, call: Portal) -> None:
        self._files = files
        self._call = call
        self.root = files.root

    @property
    def read_only(self) -> bool:
        return bool(self._call(self._files.is_read_only))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def blocking(*args: Any, **kwargs: Any) -> Any:
            result = self._call(method, *args, **kwargs)
            return STREAMS[name](result, self._call) if name in STREAMS else result

        return blocking


METHODS = (
    "read", "read_bytes", "exists", "is_file", "is_dir", "stat", "list", "glob", "grep", "write", "write_bytes",
    "delete", "mkdir", "open_read", "open_write", "open_text", "snapshot", "restore", "export_archive",
    "import_archive",
)  # fmt: skip
for method_name in METHODS:  # `isinstance` of a runtime-checkable protocol looks for them in the class
    setattr(Blocking, method_name, property(lambda self, name=method_name: Blocking.__getattr__(self, name)))


class BlockingStream:
    """A stream that makes each call on the async twin."""

    def __init__(self, stream: Any, call: Portal) -> None:
        self._stream = stream
        self._call = call

    def __enter__(self) -> Self:
        self._call(self._stream.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(self._stream.__aexit__, kind, error, traceback)

    @property
    def path(self) -> Any:
        return self._stream.path

    @property
    def closed(self) -> Any:
        return self._stream.closed

    def close(self) -> None:
        self._call(self._stream.close)


class BlockingReader(BlockingStream):
    @property
    def position(self) -> Any:
        return self._stream.position

    @property
    def size(self) -> Any:
        return self._call(self._stream.size)

    def read(self, size: int = -1) -> Any:
        return self._call(self._stream.read, size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> Any:
        return self._call(self._stream.seek, offset, whence)

    def chunks(self, size: int = STREAM_CHUNK_BYTES) -> Iterator[bytes]:
        return self._call.iterate(self._stream.chunks(size))

    def __iter__(self) -> Iterator[bytes]:
        return self._call.iterate(aiter(self._stream))


class BlockingTextReader(BlockingStream):
    @property
    def encoding(self) -> Any:
        return self._stream.encoding

    @property
    def line_number(self) -> Any:
        return self._stream.line_number

    def readline(self) -> Any:
        return self._call(self._stream.readline)

    def read(self, size: int = -1) -> Any:
        return self._call(self._stream.read, size)

    def lines(self, *, strip: bool = False) -> Iterator[str]:
        return self._call.iterate(self._stream.lines(strip=strip))

    def __iter__(self) -> Iterator[str]:
        return self._call.iterate(aiter(self._stream))


class BlockingWriter(BlockingStream):
    @property
    def bytes_written(self) -> Any:
        return self._stream.bytes_written

    def write(self, data: Any) -> Any:
        return self._call(self._stream.write, data)

    def seek(self, offset: int, whence: int = 0) -> Any:
        return self._call(self._stream.seek, offset, whence)

    def write_all(self, chunks: Iterable[Any]) -> Any:
        return self._call(self._stream.write_all, chunks)


STREAMS = {"open_read": BlockingReader, "open_text": BlockingTextReader, "open_write": BlockingWriter}


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """One workspace and one loop for all tests, with the snapshot "empty"."""
    place, name = tmp_path_factory.mktemp("shared") / "mount", f"async-{request.param}"
    with mounted(place, engine="native", name=name) as workspace, start_blocking_portal(request.param) as portal:
        workspace.snapshot("empty")
        call = Portal(portal)
        files = call(lambda: AsyncWorkspace.attach(name)).async_filesystem
        yield workspace, Blocking(files, call)


class OnAsyncWorkspace:
    @pytest.fixture
    def filesystem(self, shared: tuple[Any, Any]) -> Iterator[SnapshotableFilesystem]:
        workspace, files = shared
        yield files
        workspace.restore("empty")
        names = [snapshot.name for snapshot in workspace.snapshots(changes=False) if snapshot.name != "empty"]
        if names:
            workspace.drop(*names)


class TestFilesystem(OnAsyncWorkspace, FilesystemContract):
    pass


class TestStreaming(OnAsyncWorkspace, StreamingContract):
    pass


class TestSnapshots(OnAsyncWorkspace, SnapshotContract):
    pass


class TestArchives(OnAsyncWorkspace, ArchiveContract):
    pass
