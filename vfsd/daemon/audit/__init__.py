"""The audit log: which process changed what in the workspace, and when."""
