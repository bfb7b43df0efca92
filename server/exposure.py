"""Who can reach the server, and whether it may start so: beyond loopback only with keys, or on somebody's word."""

from __future__ import annotations

import ipaddress
import time

from server.registry.access import Access
from server.registry.registry import open_registry
from server.settings import Settings
from unbind_core.errors import UnbindError


class Exposed(UnbindError):
    """The server would be open to a network without any key."""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is one that every machine has for itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def on_loopback(settings: Settings) -> bool:
    """Whether only this machine can reach the server."""
    return is_loopback(settings.host)


def is_own_name(host: str, settings: Settings) -> bool:
    """Whether a Host header, with any port, names loopback, the address listened on or one of ``allowed_hosts``."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return is_loopback(name) or name in (settings.host, *(allowed.lower() for allowed in settings.allowed_hosts))


def check_exposure(settings: Settings) -> None:
    """Raise Exposed where the server would listen beyond loopback without a key. An admin key that was set is one."""
    if on_loopback(settings) or settings.insecure or settings.admin_key:
        return
    registry = open_registry(settings)
    try:
        if any(key.usable(time.time()) for key in Access(registry.transactions).current.keys.values()):
            return
    finally:
        registry.close()
    raise Exposed(
        f"host {settings.host} is reachable from other machines and no key exists; make one with "
        f"'unbind key create NAME --data-dir {settings.data_dir}', set admin_key, listen on 127.0.0.1, or start with --insecure"
    )
