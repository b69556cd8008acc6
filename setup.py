"""What pyproject.toml cannot say: a wheel of `make wheel` has the compiled modules, so it is for one Python."""

from __future__ import annotations

import os

from setuptools import Distribution, setup

COMPILED = bool(os.environ.get("VFSD_COMPILED_WHEEL"))


class Wheel(Distribution):
    """Names the platform in the wheel's tag if it has extensions."""

    def has_ext_modules(self) -> bool:
        return COMPILED


setup(
    distclass=Wheel,
    # A checkout may have extensions of its own: every other wheel leaves them out.
    exclude_package_data={} if COMPILED else {"": ["*.so"], "protocol.compiled": ["*.json"]},
    # setuptools puts what an earlier build left in its directory into a wheel, too.
    options={"build": {"build_base": "build/wheel" if COMPILED else "build"}},
)
