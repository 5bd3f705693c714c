"""Where a vLLM server may be: the rules of `engine.urls`, and the key it is addressed with. Imports nothing heavy."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

KEY_VARIABLE = "ASYNC_RL_API_KEY"
"""Environment variable with the key that trainer and servers share."""


def check_url(url: str, *, allow_remote: bool) -> str:
    """The base URL of a server, without a slash at its end.

    Raises:
        ValueError: it can't be one, holds a secret, or is on another machine without leave; names the fix.
    """
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{without_secret(url)} has a user name or password in it, which would end up in files and logs; leave it "
            f"out and set the environment variable {KEY_VARIABLE} here and where the server runs"
        )
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address of a server; give one like http://127.0.0.1:8001")
    if not is_loopback(parts.hostname):
        if not allow_remote:
            raise ValueError(
                f"{url} is not on this machine (a loopback address); set engine.allow_remote=true if that is meant"
            )
        if not api_key():
            raise ValueError(
                f"{url} is not on this machine, so a key is needed: set the environment variable {KEY_VARIABLE} to the "
                "same value here and where the server runs"
            )
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_key() -> str:
    """The key from the environment; empty where there is none."""
    return os.environ.get(KEY_VARIABLE, "")


def without_secret(text: str) -> str:
    """``text`` with what stands before the host of a URL, or is given to a key, replaced by stars."""
    text = re.sub(r"//[^/@\s]*@", "//***@", text)
    return re.sub(r"((?:key|password|secret)=)[^\s)]+", r"\1***", text, flags=re.IGNORECASE)
