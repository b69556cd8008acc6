"""The tools that a model can call, defined once for every backend.

    context = ToolContext(InMemoryFilesystem())
    for tool in tools_for(context).values():
        describe(tool.name, tool.description, tool.json_schema())
    result = TOOLS["read_file"].call(arguments, context)
    answer = TOOLS["read_file"].render(result)

A tool runs on the thread that its filesystem belongs to.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from protocol.tools.base import (
    PYTHON,
    SHELL,
    DirectoryCreated,
    EventHook,
    FileDeleted,
    FileEdited,
    FileEvent,
    FileWritten,
    Subscriber,
    Tool,
    ToolContext,
)
from protocol.tools.files import EDIT_FILE, LS, READ_FILE, RM, WRITE_FILE
from protocol.tools.search import GLOB, GREP

__all__ = [
    "TOOLS",
    "DirectoryCreated",
    "EventHook",
    "FileDeleted",
    "FileEdited",
    "FileEvent",
    "FileWritten",
    "Subscriber",
    "Tool",
    "ToolContext",
    "tools_for",
]

_ALL: Final[tuple[Tool[Any, Any], ...]] = (LS, READ_FILE, WRITE_FILE, EDIT_FILE, GLOB, GREP, RM, SHELL, PYTHON)
_CHANGING: Final = frozenset({WRITE_FILE.name, EDIT_FILE.name, RM.name})

TOOLS: Final[Mapping[str, Tool[Any, Any]]] = MappingProxyType({tool.name: tool for tool in _ALL})


def tools_for(context: ToolContext) -> Mapping[str, Tool[Any, Any]]:
    """Return the tools that work in `context`.

    Tools that run commands need an executor, and tools that change files need a writable filesystem.
    """
    return {
        name: tool
        for name, tool in TOOLS.items()
        if (context.executor is not None or not tool.executes)
        and not (context.filesystem.read_only and name in _CHANGING)
    }
