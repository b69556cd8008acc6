"""Messages between processes: the control socket, mount options, the start-up handshake."""
