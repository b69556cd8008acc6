"""Transport through the container's root file system as this host sees it (/proc/PID/root)."""
