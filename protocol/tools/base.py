"""Tool: a function for a model, with a name, a description, and typed parameters and results; and its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from protocol.execution.executor import Executor
from protocol.filesystem import Filesystem
from protocol.search.walk import CancelCheck, never_cancelled
from protocol.tool_messages import Params
from protocol.tools.events import FileEvent, Subscriber, deliver
from protocol.tree import Tree

__all__ = ["Tool", "ToolContext", "json_schema", "printable"]

P = TypeVar("P", bound=Params)
R = TypeVar("R")  # a `Result`, or a dataclass of `protocol.types`


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The files and services that tools work on.

    `publish` is called with each change that was made.  `executor` runs commands, if the backend can.  `tree` opens the
    present state as an immutable tree, which is faster to search; without it the filesystem is walked.  `keep_going` is
    called often during a search; an exception from it ends the search.
    """

    filesystem: Filesystem
    publish: Subscriber = lambda _event: None
    executor: Executor | None = None
    tree: Callable[[], AbstractContextManager[Tree]] | None = None
    keep_going: CancelCheck = never_cancelled

    def published(self, event: FileEvent) -> None:
        """Publish `event`."""
        deliver(event, self.publish)


@dataclass(frozen=True, slots=True)
class Tool(Generic[P, R]):
    """One tool; `tools.TOOLS` has all of them.

    A call that fails raises OSError (the subclass for its errno) or ValueError, with a message that a model can act on.
    """

    name: str
    description: str
    params: type[P]
    result: type[R]
    run: Callable[[P, ToolContext], R]
    rendering: Callable[[R], str]
    executes: bool = False  # needs an executor

    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of the parameters (an object), as model APIs take it."""
        return json_schema(self.params)

    def parse(self, arguments: Mapping[str, Any] | str | bytes) -> P:
        """Parse a model's arguments: a mapping, or JSON text.  ValueError says what is wrong."""
        return parsed(msgspec.json.decode(arguments) if isinstance(arguments, str | bytes) else arguments, self.params)

    def call(self, arguments: Mapping[str, Any] | str | bytes, context: ToolContext) -> R:
        """Parse `arguments` and run the tool."""
        return self.run(self.parse(arguments), context)

    def render(self, result: R) -> str:
        """Render the result as text for a model."""
        return printable(self.rendering(result))


def parsed(arguments: object, params: type[P]) -> P:
    """Return a model's arguments as an object of the class `params`.  ValueError says what is wrong."""
    if isinstance(arguments, Mapping):
        known = [field.encode_name for field in msgspec.structs.fields(params)]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            names = ", ".join(known) or "none"
            raise msgspec.ValidationError(f"unknown argument {unknown[0]!r}: the arguments are {names}")
    return msgspec.convert(arguments, type=params)


def json_schema(params: type[Params]) -> dict[str, Any]:
    """Return the JSON schema of a class of parameters (an object), as model APIs take it."""
    _, components = msgspec.json.schema_components([params], ref_template="#/$defs/{name}")
    schema: dict[str, Any] = components.pop(params.__name__)
    schema.pop("description", None)  # the class's docstring, which repeats the tool's description
    return {**schema, "$defs": components} if components else schema


def printable(text: str) -> str:
    """Replace each byte of a name that is not UTF-8 by \\xNN, so that the text can be encoded."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
