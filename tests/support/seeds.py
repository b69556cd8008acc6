"""Seeds of random campaigns: fixed in CI, new for each run elsewhere.

CI decides whether a change goes in, so the same change must always get the same answer. A developer's run and the long
campaigns look for defects that nobody knows yet, so each of them takes another path.
"""

from __future__ import annotations

import os
import random

_CI_SEED = 20_261


def campaign_seed() -> int:
    """Return the seed for one campaign. The caller prints it if the campaign fails."""
    return _CI_SEED if os.environ.get("CI") else random.SystemRandom().randrange(2**32)
