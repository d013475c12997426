"""Ports on this machine."""

from __future__ import annotations

import errno
import ipaddress
import socket


def why_not(ip: str, port: int) -> str | None:
    """Return why no program can listen there, in a sentence; None: one can."""
    if not 1 <= port <= 65535:
        return f"{port} is not a valid port: ports are 1 to 65535"
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return f"{ip!r} is not an IP address; write one like 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {ip} is in use by another program"
            if error.errno == errno.EACCES:
                return f"only root can use port {port}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                return f"{ip} is not an address of this machine"
            return f"port {port} of {ip} cannot be used: {error.strerror}"
    return None


def next_free(ip: str, port: int) -> int:
    """Return the first free port above `port`; any free one if the next hundred are in use."""
    nearby = (other for other in range(port + 1, min(port + 101, 65536)) if why_not(ip, other) is None)
    return next(nearby, 0) or free_ports(1)[0]


def is_loopback(ip: str) -> bool:
    """Return whether only this machine can reach the address."""
    return ipaddress.ip_address(ip).is_loopback


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 that are free now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
