"""What the methods of the control socket do.  `vfsd.daemon.control.methods` has their table."""
