"""A state that was saved for a client alone is dropped if the client cannot learn its name, or is killed."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from protocol.store import DirectorySource, Store
from protocol.tree import Tree
from tests.support.trees import DictTree
from vfsd.daemon.control.calls import CallCancelledError, CallContext
from vfsd.daemon.control.handlers.workspace import SavedStates
from vfsd.daemon.snapshots.base import StoredState
from vfsd.operations.snapshots import SaveParams

KEY = "memory:/m"


class Service:
    """Has one file, and its snapshots in memory or, with `directory`, in the store."""

    def __init__(self, store: Path, directory: Path | None) -> None:
        self._store = store
        self._directory = directory

    async def stored_state(self, _name: str | None, _call: CallContext) -> StoredState | None:
        if self._directory is None:
            return None
        with Store(self._store) as store:
            store.take(KEY, "archive-1", DirectorySource(self._directory))
        return StoredState(str(self._store), KEY, "archive-1", is_temporary=True)

    async def infos(self) -> list[Any]:
        return []

    @asynccontextmanager
    async def to_save(self, _name: str | None, _call: CallContext) -> AsyncIterator[Tree]:
        yield DictTree({b"file": b"content"})


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("kind", ["in memory", "in the store"])
def test_a_call_that_is_cancelled_while_it_saves_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_cancelled: bool
) -> None:
    directory = tmp_path / "content"
    directory.mkdir()
    options: Any = SimpleNamespace(
        store=str(tmp_path / "store"), backend=SimpleNamespace(kind="memory"), mountpoint="/m"
    )
    mounted: Any = SimpleNamespace(left_out_of=lambda _: 0)
    service: Any = Service(tmp_path / "store", None if kind == "in memory" else directory)
    take = Store.take
    outcome: list[Any] = []

    async def send(_line: bytes) -> None: ...

    async def run() -> None:
        call = CallContext(1, silent=True, send=send, progress_ready=lambda _: None)

        def take_late(*args: Any, **kwargs: Any) -> Any:
            info = take(*args, **kwargs)
            if is_cancelled:  # as when the client disconnects while the state is being saved
                call.abandon()
            return info

        monkeypatch.setattr(Store, "take", take_late)
        try:
            outcome.append(await SavedStates(mounted, service, options).save(SaveParams(), call))
        except CallCancelledError as error:
            outcome.append(error)

    trio.run(run)
    with Store(tmp_path / "store") as store:
        names = [info.name for info in store.snapshots(KEY)]
    if is_cancelled:
        assert isinstance(outcome[0], CallCancelledError)
        assert names == []
    else:
        assert names == [outcome[0].name]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_state_of_a_killed_client_is_dropped_and_no_other_one_of_that_name(tmp_path: Path, is_replaced: bool) -> None:
    options: Any = SimpleNamespace(
        store=str(tmp_path / "store"), backend=SimpleNamespace(kind="memory"), mountpoint="/m"
    )
    content = tmp_path / "content"
    content.mkdir()

    async def send(_line: bytes) -> None: ...

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            mounted: Any = SimpleNamespace(left_out_of=lambda _: 0, in_background=nursery.start_soon)
            service: Any = Service(tmp_path / "store", None)
            with subprocess.Popen(["sleep", "1000"]) as client:
                call = CallContext(1, silent=True, send=send, progress_ready=lambda _: None, client=client.pid)
                saved = await SavedStates(mounted, service, options).save(SaveParams(), call)
                with Store(tmp_path / "store") as store:
                    assert [info.name for info in store.snapshots(KEY)] == [saved.name]
                    if is_replaced:
                        store.drop(KEY, saved.name)
                        store.take(KEY, saved.name, DirectorySource(content))
                client.kill()

    trio.run(run)
    with Store(tmp_path / "store") as store:
        assert [info.name for info in store.snapshots(KEY)] == ["archive-1"] * is_replaced
