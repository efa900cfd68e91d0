"""Access control of a job's dashboard: whoever has its key may view and use it.

The key is derived from the job's token, but not vice versa: its holder can stop the job, but not join it. The page
keeps the key in its tab and sends it in a header, which other sites can't make a browser do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

_PURPOSE = b"elasticcb dashboard"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def key_of(token: str) -> str:
    """The key for the dashboard of the job with this token; without a token, a random key."""
    if not token:
        return secrets.token_hex(16)
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()[:32]


def refusal(headers: Mapping[str, str], key: str | None) -> str:
    """Why a request is refused; "": it is accepted.

    Args:
        headers: by lowercase name.
        key: key that it must carry; None: no key, the resource is public.
    """
    host = headers.get("host", "")
    if not _is_loopback(host):  # another site's name may resolve to this machine: DNS rebinding
        return f"This server accepts only addresses of this machine, not {host!r}. Open http://127.0.0.1 with its port."
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return "The request comes from another site."
    if key is None:
        return ""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode()):
        return ""
    return (
        "The key is missing or wrong. Open the complete address that the dashboard printed, including the part after #."
    )


def _is_loopback(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _LOOPBACK
    except ValueError:  # it is not a host
        return False
