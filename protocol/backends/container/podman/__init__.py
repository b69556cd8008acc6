"""Client of Podman's API: containers, images, exec sessions, over a Unix socket or ssh."""
