"""The journal of an overlay: that of a volume in memory, with what its changes are based on in the lower layer."""
