"""WritingContract: changes of files and directories of a `Filesystem`; a part of FilesystemContract."""

from __future__ import annotations

import contextlib
from typing import Final, get_args

import pytest

from protocol.filesystem import Filesystem
from protocol.testing.checks import contents, raises_os_error
from protocol.types import WriteMode

_WRITE_LIMIT: Final = 32 << 20
_MODES: Final = pytest.mark.parametrize("mode", get_args(WriteMode))


class WritingContract:
    """The contract of changes."""

    @_MODES
    def test_every_mode_makes_a_new_file_and_its_parents(self, filesystem: Filesystem, mode: WriteMode) -> None:
        result = filesystem.write("deep/down/file", "grün", mode=mode)

        assert (result.path, result.bytes_written, result.mode) == ("deep/down/file", 5, mode)
        assert contents(filesystem) == {"deep": None, "deep/down": None, "deep/down/file": "grün".encode()}

    def test_overwrite_replaces_what_was_there(self, filesystem: Filesystem) -> None:
        filesystem.write_bytes("file", b"a long old content")

        filesystem.write_bytes("file", b"new")

        assert contents(filesystem) == {"file": b"new"}

    def test_append_adds_to_what_was_there(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "one\n")

        result = filesystem.write("file", "two\n", mode="append")

        assert result.bytes_written == 4
        assert contents(filesystem) == {"file": b"one\ntwo\n"}

    def test_create_leaves_a_file_that_is_there_alone(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with raises_os_error(FileExistsError, "file"):
            filesystem.write("file", "new", mode="create")

        assert contents(filesystem) == {"file": b"old"}

    @_MODES
    def test_an_empty_file_is_a_file(self, filesystem: Filesystem, mode: WriteMode) -> None:
        assert filesystem.write("file", "", mode=mode).bytes_written == 0
        assert contents(filesystem) == {"file": b""}

    @_MODES
    def test_a_directory_cannot_be_written(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.mkdir("directory")

        with raises_os_error(IsADirectoryError, "directory"):
            filesystem.write("directory", "x", mode=mode)

    @_MODES
    def test_nothing_can_be_written_below_a_file(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.write("file", "x")

        for path in ("file/below", "file/far/below"):
            with raises_os_error(NotADirectoryError, path):
                filesystem.write(path, "x", mode=mode)

    @_MODES
    def test_the_root_cannot_be_written(self, filesystem: Filesystem, mode: WriteMode) -> None:
        for path in (".", "/", "a/.."):
            with pytest.raises(ValueError, match="root"):
                filesystem.write(path, "x", mode=mode)

    def test_an_unknown_mode_is_refused(self, filesystem: Filesystem) -> None:
        with pytest.raises(ValueError, match="truncate"):
            filesystem.write("file", "x", mode="truncate")  # type: ignore[arg-type]

        assert contents(filesystem) == {}

    @_MODES
    def test_a_missing_parent_is_made_only_when_allowed(self, filesystem: Filesystem, mode: WriteMode) -> None:
        with raises_os_error(FileNotFoundError, "no/file"):
            filesystem.write("no/file", "x", mode=mode, create_parents=False)

        assert contents(filesystem) == {}

    def test_a_write_over_the_limit_changes_nothing(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with pytest.raises(ValueError, match="limited"):
            filesystem.write_bytes("file", bytes(_WRITE_LIMIT + 1))
        with pytest.raises(ValueError, match="limited"):
            filesystem.write("new/file", "é" * (_WRITE_LIMIT // 2 + 1))

        assert contents(filesystem) == {"file": b"old"}

    def test_text_that_utf8_cannot_say_is_refused_and_changes_nothing(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "old")

        with pytest.raises(ValueError, match="surrogates"):
            filesystem.write("file", "\udcff")

        assert contents(filesystem) == {"file": b"old"}

    def test_too_deep_a_path_is_not_created(self, filesystem: Filesystem) -> None:
        deepest = "/".join("d" * 16)
        filesystem.write(deepest, "x")

        with pytest.raises(ValueError, match="deep"):
            filesystem.write("new/" + deepest, "x")
        with pytest.raises(ValueError, match="deep"):
            filesystem.mkdir("new/" + deepest)

        assert not filesystem.exists("new")

    def test_too_long_a_name_is_not_created(self, filesystem: Filesystem) -> None:
        filesystem.write("n" * 80, "x")

        with pytest.raises(ValueError, match="80"):
            filesystem.write("new/" + "n" * 81, "x")

        assert not filesystem.exists("new")

    # -- directories -------------------------------------------------------------------------
    def test_a_directory_is_made_with_its_parents(self, filesystem: Filesystem) -> None:
        filesystem.mkdir("a/b/c")

        assert contents(filesystem) == {"a": None, "a/b": None, "a/b/c": None}

    def test_a_directory_that_is_there_is_fine_unless_it_must_be_new(self, filesystem: Filesystem) -> None:
        filesystem.write("directory/file", "x")

        filesystem.mkdir("directory")
        with raises_os_error(FileExistsError, "directory"):
            filesystem.mkdir("directory", exist_ok=False)

        assert contents(filesystem) == {"directory": None, "directory/file": b"x"}

    def test_a_directory_is_not_made_over_or_below_a_file(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with raises_os_error(FileExistsError, "file"):
            filesystem.mkdir("file")
        with raises_os_error(NotADirectoryError, "file/below"):
            filesystem.mkdir("file/below")

    def test_without_parents_the_parent_must_be_there(self, filesystem: Filesystem) -> None:
        with raises_os_error(FileNotFoundError, "a/b"):
            filesystem.mkdir("a/b", parents=False)

        assert contents(filesystem) == {}

    def test_the_root_is_there_already(self, filesystem: Filesystem) -> None:
        filesystem.mkdir(".")

        with raises_os_error(FileExistsError, "."):
            filesystem.mkdir("/", exist_ok=False)

    # -- deleting ----------------------------------------------------------------------------
    def test_a_file_is_deleted_and_counted(self, filesystem: Filesystem) -> None:
        filesystem.write("d/file", "x")
        filesystem.write("d/other", "y")

        assert filesystem.delete("d/file") == 1
        assert contents(filesystem) == {"d": None, "d/other": b"y"}

    def test_an_empty_directory_is_deleted_without_recursive(self, filesystem: Filesystem) -> None:
        filesystem.mkdir("directory")

        assert filesystem.delete("directory") == 1
        assert contents(filesystem) == {}

    def test_a_directory_is_deleted_with_all_that_is_in_it_and_each_entry_counted(self, filesystem: Filesystem) -> None:
        for path in ("d/a", "d/b/c", "d/b/e/f", "other"):
            filesystem.write(path, "x")

        assert filesystem.delete("d", recursive=True) == 6
        assert contents(filesystem) == {"other": b"x"}

    def test_the_root_is_not_deleted(self, filesystem: Filesystem) -> None:
        filesystem.write("file", "x")

        with pytest.raises(ValueError, match="root"):
            filesystem.delete("/", recursive=True)

        assert contents(filesystem) == {"file": b"x"}

    # -- a write that fails --------------------------------------------------------------------
    @pytest.mark.parametrize("mode", ["create", "overwrite"])
    def test_a_writer_that_fails_leaves_no_trace(self, filesystem: Filesystem, mode: WriteMode) -> None:
        filesystem.write("d/other", "x")
        if mode == "overwrite":
            filesystem.write("d/file", "old")
        before = contents(filesystem)

        with contextlib.suppress(ZeroDivisionError), filesystem.open_write("d/file", mode=mode) as writer:
            writer.write(b"half")
            raise ZeroDivisionError

        assert contents(filesystem) == before
