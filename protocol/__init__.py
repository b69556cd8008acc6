"""protocol: the contract of vfsd's backends, and the backends that keep it.  Useful without a mount."""
