"""Types that the messages of several methods share."""

from __future__ import annotations

import msgspec


class Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the parameters of a method.  A parameter with an unknown name is an error (INVALID_PARAMS)."""


class Empty(msgspec.Struct, forbid_unknown_fields=True):
    """A message without fields: no parameters, or a result without content."""
