"""The engines, which serve a volume to the kernel."""

import protocol as protocol  # finds the extensions of modules of this package
