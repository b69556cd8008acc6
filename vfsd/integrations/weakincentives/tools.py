"""vfsd's tools as WINK's: the same names, descriptions, parameters and answers as `protocol.tools`.

The classes of the parameters are made from those of `protocol.tools`, as frozen dataclasses, which WINK requires.
They are attributes of this module (`ReadFileParams`, ...), so that WINK finds them when it reads a session's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from weakincentives.prompt import Tool as WinkTool
from weakincentives.prompt import ToolResult

from protocol.tools import TOOLS as DEFINITIONS
from protocol.tools import Tool, ToolContext, tools_for


@dataclasses.dataclass(frozen=True, slots=True)
class ToolOutput:
    """The answer of a tool, as the model reads it."""

    text: str

    def render(self) -> str:
        return self.text


def wink_tools(context: ToolContext) -> tuple[Any, ...]:
    """Return the tools that work in `context`, as WINK's tools."""
    return tuple(_wink_tool(tool, context) for tool in tools_for(context).values())


def _wink_tool(tool: Tool[Any, Any], context: ToolContext) -> Any:
    params = _PARAMS[tool.name]
    return WinkTool[params, ToolOutput](name=tool.name, description=tool.description, handler=_handler(tool, context))


def _handler(tool: Tool[Any, Any], files: ToolContext) -> Callable[..., Any]:
    def handler(params: Any, *, context: Any) -> Any:
        context.beat()
        try:
            text = tool.render(tool.call(dataclasses.asdict(params), files))
        except (OSError, ValueError) as error:
            return ToolResult.error(str(error))
        return ToolResult.ok(ToolOutput(text), message=text)

    return handler


def _dataclass_of(params: type[msgspec.Struct]) -> type:
    """Return a frozen dataclass with the fields, defaults and limits of `params`."""
    fields = []
    for field in msgspec.structs.fields(params):
        kind, metadata = _plain(field.type)
        default = dataclasses.MISSING if field.default is msgspec.NODEFAULT else field.default
        made: Any = dataclasses.field(default=default, metadata=metadata)
        fields.append((field.name, kind, made))
    required_first = sorted(fields, key=lambda field: field[2].default is not dataclasses.MISSING)
    made_class = dataclasses.make_dataclass(params.__name__, required_first, frozen=True)
    made_class.__module__ = __name__
    made_class.__doc__ = params.__doc__
    return made_class


def _plain(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Split a type into the type without msgspec's annotations, and WINK's metadata for its limits."""
    if get_origin(kind) is not Annotated:
        return kind, {}
    plain, *annotations = get_args(kind)
    found: dict[str, Any] = {}
    for meta in annotations:
        values = {name: getattr(meta, name) for name in ("ge", "gt", "le", "lt")}
        found |= {name: value for name, value in values.items() if value is not None}
    return plain, found


_PARAMS: Final = {name: _dataclass_of(tool.params) for name, tool in DEFINITIONS.items()}
globals().update({params.__name__: params for params in _PARAMS.values()})
