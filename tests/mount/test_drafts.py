"""The drafts' names and return types on the filesystem object of a mounted workspace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.protocol.test_drafts import ROWS, Row, check, filled
from vfsd import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with Workspace.mount(tmp_path_factory.mktemp("drafts") / "m") as workspace:
        yield workspace


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_calls_answer_as_in_the_drafts(row: Row, workspace: Workspace, tmp_path: Path) -> None:
    for each in workspace.filesystem.list():
        workspace.filesystem.delete(each.path, recursive=True)
    check(row, filled(workspace.filesystem), tmp_path)
