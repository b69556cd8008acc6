"""The handlers of the operations, which `vfsd.daemon.control.methods` calls."""
