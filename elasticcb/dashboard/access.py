"""Who may see the page of a job, and act by it: whoever holds its key.

The key follows from the job's token, which does not follow from the key: who has it can stop the job, and can't take
part in it. The page keeps it in its tab and sends it in a header, which no other page can make a browser do.
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
    """The key to the page of the job with this token; without a token, one that was never there."""
    if not token:
        return secrets.token_hex(16)
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()[:32]


def refusal(headers: Mapping[str, str], key: str | None) -> str:
    """Why a request is refused; "": it is not.

    Args:
        headers: by name in small letters.
        key: that it must carry; None: none, it is for what is no secret.
    """
    host = headers.get("host", "")
    if not _is_loopback(host):  # another site's name may lead here: DNS rebinding
        return f"This server is for addresses of this machine, not for {host!r}. Open http://127.0.0.1 and its port."
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return "The request is from a page of another site."
    if key is None:
        return ""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode()):
        return ""
    return "The key is missing or wrong. Open the address that the dashboard printed, with what stands behind its #."


def _is_loopback(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _LOOPBACK
    except ValueError:  # it is no host at all
        return False
