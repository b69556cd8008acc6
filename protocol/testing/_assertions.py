"""Registration of the suites for pytest's assertion rewriting; imported before them."""

from __future__ import annotations

import sys
from typing import Final

import pytest

_SUITES: Final = ("archive", "filesystem", "read_only", "streaming", "volume")

pytest.register_assert_rewrite(*(name for suite in _SUITES if (name := f"protocol.testing.{suite}") not in sys.modules))
