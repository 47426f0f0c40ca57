"""Servers: address, API key, signals."""

from vox_core.listening import (
    LOOPBACK as LOOPBACK,
    is_loopback as is_loopback,
    listening as listening,
    require_key as require_key,
    signals_ignored as signals_ignored,
    url_of as url_of,
)
