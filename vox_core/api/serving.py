"""Servers: address, API key."""

from vox_core.listening import (
    LOOPBACK as LOOPBACK,
    is_loopback as is_loopback,
    listening as listening,
    require_key as require_key,
    url_of as url_of,
)
