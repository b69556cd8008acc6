"""Contract suites: subclass one, give it a factory, and pytest says where an implementation breaks the contract.

    class TestMyVolume(VolumeContract):
        @pytest.fixture
        def volume(self):
            def make(*, max_bytes=None, max_inodes=None, clock=None):
                return MyVolume(...)
            return make

What each call must answer is `protocol.volume`'s docstrings; where they are silent, tmpfs is asked.
"""

from __future__ import annotations

from protocol.testing.volume import Clock, Driver, MakeVolume, VolumeContract

__all__ = ["Clock", "Driver", "MakeVolume", "VolumeContract"]
