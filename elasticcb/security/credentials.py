"""The credentials of a process: the job's token, and certificates if the job uses TLS."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from elasticcb.errors import UsageError
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import TLS

TOKEN_VARIABLE = "ELASTICCB_JOB_TOKEN"  # environment variable with the token of a process


@dataclass(frozen=True)
class Access:
    """Credentials with which the processes of a job authenticate each other.

    Attributes:
        token: token in every call; "": no token is required (only in tests).
        tls: None: without encryption.
        term: for a master that calls servers: the training, and the number of this master; None for others.
    """

    token: str = field(default="", repr=False)
    tls: TLS | None = None
    term: tuple[str, int] | None = None

    def certificate_expires(self) -> float:
        """When this process's own certificate expires, in seconds since the epoch; 0: it has none."""
        return 0.0 if self.tls is None else self.tls.certificate.expires


OPEN = Access()  # to anybody


def is_loopback(host: str) -> bool:
    """Whether only processes on this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or is_folder(host)


def token_of_environment(variable: str = TOKEN_VARIABLE) -> str:
    """The token in a variable of the environment; "" if there is none.

    Raises `UsageError` if it contains invalid characters.
    """
    token = os.environ.get(variable, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError(
            f"The environment variable {variable} contains invalid characters (its value is not shown here). "
            "Expected printable ASCII characters without spaces."
        )
    return token
