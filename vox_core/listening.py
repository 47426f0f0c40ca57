"""Addresses and API keys of servers.

Checked before a model is loaded. Without an API key a server answers this machine alone, and only
requests to a loopback name, which keeps a web page from reaching it through a name of its own (DNS
rebinding).
"""

from __future__ import annotations

import socket
from contextlib import ExitStack

from vox_core.errors import ConfigError

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
MIN_KEY = 16
"""Characters of an API key."""


def listening(host: str, port: int, stalled: int = 60) -> socket.socket:
    """Return a socket that listens, so that a port in use is found before a model is loaded.

    Args:
        stalled: seconds after which a client that reads nothing loses its connection, on Linux.

    Raises:
        ConfigError: C002, the address cannot be used.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        with ExitStack() as unless_it_listens:
            # With its protocol named: asyncio sets TCP_NODELAY on such sockets only, without which
            # each response on a kept-alive connection waits 40 ms.
            listener = unless_it_listens.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections have their listener's
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled * 1000)
            listener.bind(address)
            listener.listen()
            unless_it_listens.pop_all()
        return listener
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "C002",
            "the server cannot listen on this address",
            where="--host and --port",
            found=f"{host}:{port}: {error}",
            remedy="stop the other server, or choose another --port; 0 takes a free one",
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return `http://HOST:PORT`."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def require_key(host: str, key: str | None, prefix: str = "") -> None:
    """Check the key.

    Args:
        prefix: begins every key that the clients send.

    Raises:
        ConfigError: C002, it is too short or begins otherwise; C004, the address needs one.
    """
    made = f'"{prefix}" + secrets.token_urlsafe()' if prefix else "secrets.token_urlsafe()"
    if key is not None and (len(key) < MIN_KEY or not key.startswith(prefix)):
        raise ConfigError(
            "C002",
            "the API key cannot be used",
            where="--api-key or VOX_API_KEY",
            found=f"{len(key)} characters" if key.startswith(prefix) else f"no {prefix!r} in front",
            expected=f"{MIN_KEY} characters or more" + (f", {prefix!r} in front" if prefix else ""),
            remedy=f"make one with: python -c 'import secrets; print({made})'",
        )
    if key is None and host not in LOOPBACK:
        what = "other machines could use the server without a key"
        remedy = "set VOX_API_KEY, or leave out --host"
        raise ConfigError("C004", what, where="--host", found=host, remedy=remedy)


def is_loopback(header: str) -> bool:
    """Whether a Host header names this machine, with or without a port."""
    name = header.partition("]")[0].lstrip("[") if header.startswith("[") else header
    return (name if header.startswith("[") else name.rpartition(":")[0] or name).lower() in LOOPBACK
