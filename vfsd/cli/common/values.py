"""Parameter types of the command line (sizes, seconds, backends, workspace names, variables) and shared options."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from vfsd.client.requests import check_archive_name
from vfsd.wire.options import NAME_PATTERN, BackendSpec, known_backends, parse_backend

if TYPE_CHECKING:
    _SizeType = click.ParamType[int]
    _TextType = click.ParamType[str]
else:  # generic only in newer versions of click than the oldest supported one
    _SizeType = _TextType = click.ParamType

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(iB|B)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
# The kernel's file sizes and counts are signed 64-bit numbers (off_t).
_LARGEST: Final = 2**63 - 1


def is_text(value: str) -> bool:
    """Return whether a value is UTF-8.  The daemon requires it, except for paths and commands."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Size(_SizeType):
    """512, 512M, 1.5GiB (powers of 1024) or 512MB (powers of 1000), as in dd(1)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write 1048576, 512M, 2GiB or 500MB", param, ctx)
        number, unit, suffix = match.groups()
        base = 1000 if unit and (suffix or "").upper() == "B" else 1024
        factor = base ** _POWERS[unit.upper()]
        size = int(number) * factor if number.isdigit() else int(float(number) * factor)
        if not 0 < size <= _LARGEST:
            self.fail(f"{value!r} is out of range: at least 1 byte, at most 8 EiB", param, ctx)
        return size


class CacheSize(Size):
    """A size, or 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return 0 if value == "0" else super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A number of seconds, without "nan" and "inf", which JSON cannot represent."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class Name(_TextType):
    """A workspace name, which becomes a file name and a systemd instance name."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if NAME_PATTERN.fullmatch(value) is None:
            self.fail(
                f"{value!r} is not a name: letters, digits, '.', '_' and '-', at most 64, a letter or digit first",
                param,
                ctx,
            )
        return str(value)


def environment(*, inherit: bool) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, str]]:
    """Return a callback that parses NAME=VALUE; with `inherit`, also NAME, which has the value of the caller."""

    def parse(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for value in values:
            name, equals, text = value.partition("=")
            if not name or not (equals or inherit):
                raise click.BadParameter(f"{value!r} is not NAME=VALUE")
            if not equals and name not in os.environ:
                continue
            found[name] = text if equals else os.environ[name]
            if not is_text(name + found[name]):
                raise click.BadParameter(f"{name if inherit else value!r} is not UTF-8")
        return found

    return parse


def refuse_other_archives(file: str) -> None:
    """Raise UsageError if `file` is not a name for a ZIP archive."""
    try:
        check_archive_name(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def in_home(backend: str) -> str:
    """Expand the `~` of host:~/DIR and overlay:~/DIR, which a shell does only at the beginning of a word."""
    spec = BackendSpec.split(backend)
    if spec.snapshot is not None:
        name, directory = spec.snapshot
        return str(spec.with_snapshot(name, os.path.expanduser(directory)))
    return f"{spec.kind}:{os.path.expanduser(spec.argument)}" if spec.is_path and spec.argument else backend


class Backend(_TextType):
    """memory, host:DIR, overlay:DIR (or :FILE.zip, :snapshot:NAME), container:NAME, image:REF or exec:COMMAND."""

    name = "backend"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        value = in_home(value)
        try:
            parse_backend(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        choices = [re.sub(":.*", ":", form) for form in known_backends()]
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


SIZE: Final = Size()
CACHE_SIZE: Final = CacheSize()
NAME: Final = Name()
BACKEND: Final = Backend()

include_option = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Only files that match (.gitignore's syntax); may be repeated.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out paths that match, and what is below them; may be repeated.",
)

touch_option = click.option(
    "--touch", is_flag=True, help="Give the files whose content changes the present time, so that builds notice them."
)
