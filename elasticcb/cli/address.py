"""Where a master listens, on the command line."""

from __future__ import annotations

from typing import Any

import rich_click as click

from elasticcb.security.socket_folder import is_folder


class Address(click.ParamType):
    """`HOST:PORT`, checked for its form; an IPv6 host stands in brackets. `unix:FOLDER/NUMBER` as it is."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if is_folder(str(value)):
            return str(value)
        host, colon, port = str(value).strip().rpartition(":")
        if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value!r} is no address. Expected HOST:PORT, such as 10.0.0.1:50001.", param, ctx)
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            self.fail(f"{value!r} is ambiguous. Put an IPv6 host in brackets: [::1]:50001.", param, ctx)
        return f"{host}:{port}"


MASTER_HELP = "Where the master listens; `elasticcb master` prints it. Needed."
INDEX_HELP = "The place to take, counted from 0; -1: the master chooses."
