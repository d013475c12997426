"""What is said of a port that cannot be had."""

from __future__ import annotations

import socket

import pytest

from gpushare_spawner.demo.machine import free_ports, is_loopback, next_free, why_not


def test_a_free_port_is_fine() -> None:
    (port,) = free_ports(1)
    assert why_not("127.0.0.1", port) is None


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_only_this_machine_reaches_loopback() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.1")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert why_not("127.0.0.1", port) == f"port {port} of 127.0.0.1 is in use by another program"


@pytest.mark.parametrize(
    ("ip", "port", "said"),
    [
        ("192.0.2.1", 8000, "192.0.2.1 is not an address of this machine"),
        (
            "localhorst",
            8000,
            "'localhorst' is not an IP address; write one like 127.0.0.1, or 0.0.0.0 for all addresses of this machine",
        ),
        ("127.0.0.1", 70000, "70000 is not a valid port: ports are 1 to 65535"),
        ("127.0.0.1", -1, "-1 is not a valid port: ports are 1 to 65535"),
        ("127.0.0.1", 0, "0 is not a valid port: ports are 1 to 65535"),
    ],
)
def test_addresses_that_make_no_sense(ip: str, port: int, said: str) -> None:
    assert why_not(ip, port) == said


def test_the_next_port_that_is_free_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpushare_spawner.demo.machine.why_not", lambda ip, port: None if port == 8004 else "taken")
    assert next_free("127.0.0.1", 8000) == 8004


def test_a_taken_port_is_never_proposed() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert next_free("127.0.0.1", port - 1) != port


def test_where_no_port_above_is_left_any_free_one_is_proposed() -> None:
    assert why_not("127.0.0.1", next_free("127.0.0.1", 65535)) is None
