"""Sockets: the control socket, and a socket for each session."""
