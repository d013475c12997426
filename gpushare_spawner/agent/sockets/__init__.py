"""Sockets: the control socket, and one for each session."""
