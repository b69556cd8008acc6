"""The volume of `exec:COMMAND` keeps the contract of protocol.volume, with the command `python3`."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from protocol.volume import Volume
from tests.contract import test_host_volume
from tests.support.remote import remote_volume
from tests.support.rights import needs_root

pytestmark = needs_root


class TestRemoteVolume(test_host_volume.OverHostDirectory):
    # As over the helper alone, in test_host_volume.py: what they show is the same.
    test_a_scan_lists_each_lasting_name_once_while_others_come_and_go = None  # type: ignore[assignment]
    test_rm_rf_removes_each_file_while_listing = None  # type: ignore[assignment]

    def opened(self, place: Path) -> AbstractContextManager[Volume]:
        return remote_volume(shlex.quote(sys.executable), str(place))  # type: ignore[return-value]
