"""The contract suites of `protocol.testing` on mounts, and on the async twins of their subjects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from anyio.from_thread import BlockingPortal

from protocol import HostFilesystem, InMemoryFilesystem, SnapshotableFilesystem
from protocol.streams import ByteReader, ByteWriter, TextReader
from protocol.testing.read_only import READ_ONLY_CONTENTS

__all__ = ["BlockingFilesystem", "OnMount", "read_only_archive"]


class Blocking:
    """What a protocol names, each call made on the async twin, in the loop of another thread."""

    def __init__(self, twin: Any, portal: BlockingPortal) -> None:
        self.twin = twin
        self.portal = portal

    def __init_subclass__(cls, of: type) -> None:
        for name in dir(of):  # `isinstance` of a runtime-checkable protocol looks for them in the class
            if not name.startswith("_") and name not in cls.__dict__:
                setattr(cls, name, property(lambda self, name=name: self.member(name)))

    def member(self, name: str) -> Any:
        found = getattr(self.twin, name)
        if not callable(found):
            return found

        def blocking(*args: Any, **kwargs: Any) -> Any:
            result = self.call(found, *args, **kwargs)
            if hasattr(result, "__anext__"):
                return self.iterate(result)
            return STREAMS[name](result, self.portal) if name in STREAMS else result

        return blocking

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def called() -> Any:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return self.portal.call(called)

    def iterate(self, items: Any) -> Iterator[Any]:
        async def following() -> list[Any]:
            async for item in items:
                return [item]
            return []

        while found := self.portal.call(following):
            yield found[0]

    def __enter__(self) -> Self:
        self.call(self.twin.__aenter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self.call(self.twin.__aexit__, *error)

    def iterate_twin(self) -> Iterator[Any]:
        return self.iterate(aiter(self.twin))


class BlockingFilesystem(Blocking, of=SnapshotableFilesystem):
    @property
    def read_only(self) -> bool:
        return bool(self.call(self.twin.is_read_only))


class BlockingReader(Blocking, of=ByteReader):
    __iter__ = Blocking.iterate_twin

    @property
    def size(self) -> Any:
        return self.call(self.twin.size)


class BlockingTextReader(Blocking, of=TextReader):
    __iter__ = Blocking.iterate_twin


class BlockingWriter(Blocking, of=ByteWriter):
    pass


STREAMS = {"open_read": BlockingReader, "open_text": BlockingTextReader, "open_write": BlockingWriter}


class OnMount:
    """Add this to the bases of a suite, in a module with the fixture `shared`: the path of a mount."""

    @pytest.fixture
    def filesystem(self, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> HostFilesystem:
        root = shared / tmp_path_factory.mktemp("test").name  # a name that no other test has
        root.mkdir()
        return HostFilesystem(root)


def read_only_archive(directory: Path) -> Path:
    """An archive in `directory` with what `ReadOnlyContract` expects."""
    content = InMemoryFilesystem()
    for path, data in READ_ONLY_CONTENTS.items():
        content.mkdir(path) if data is None else content.write_bytes(path, data)
    content.export_archive(directory / "content.zip")
    return directory / "content.zip"
