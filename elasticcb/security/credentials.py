"""What a process must hold to take part in a job: the job's token, and certificates where the job uses TLS."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from elasticcb.errors import UsageError
from elasticcb.security.socket_folder import is_folder
from elasticcb.security.tls import TLS

TOKEN_VARIABLE = "ELASTICCB_JOB_TOKEN"  # environment variable by which a process is given the token


@dataclass(frozen=True)
class Access:
    """By which the processes of a job know each other.

    Attributes:
        token: that every call carries; "" in tests alone: none is asked for.
        tls: None where nothing is encrypted.
        term: of a master that calls servers: the training, and which of its masters this is; None of others.
    """

    token: str = field(default="", repr=False)
    tls: TLS | None = None
    term: tuple[str, int] | None = None

    def certificate_expires(self) -> float:
        """When this process's own does, in seconds since the epoch; 0: it has none."""
        return 0.0 if self.tls is None else self.tls.certificate.expires


OPEN = Access()  # to anybody


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens at `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or is_folder(host)


def token_of_environment() -> str:
    """The job's token, as whoever started this process gave it; "" if there is none.

    Raises `UsageError` for one that no call can carry.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError(
            f"The environment variable {TOKEN_VARIABLE} holds characters that no call can carry (it is not shown "
            "here). Expected letters, digits and signs of ASCII, without spaces."
        )
    return token
