"""The audit log: which process changed what in the workspace, and when."""

import protocol as protocol  # finds the extensions of modules of this package
