"""What the tests of the backends share."""

from __future__ import annotations

import pytest

from protocol.testing import Driver
from protocol.volume import Volume


@pytest.fixture
def fs(volume: Volume) -> Driver:
    return Driver(volume)
