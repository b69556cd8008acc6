"""The differential harness: random calls against a mount of vfsd and against tmpfs; the answers must be the same."""
