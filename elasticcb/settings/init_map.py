"""Parses --init_map: "NEW=OLD,NEW2=OLD2,NEW3="."""

from __future__ import annotations

from elasticcb.errors import UsageError


def read_init_map(text: str) -> dict[str, str]:
    """Maps names in the model to names in the checkpoint; "": it starts fresh.

    Raises `UsageError` if a part is malformed or a name is given twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        new, equals, old = (each.strip().strip("/") for each in part.partition("="))
        if not equals or not new or "=" in old:
            raise UsageError(
                f"{part!r} is not of the form NEW=OLD. Expected names of layers or variables, such as "
                '"user=customer,top/kernel=": the one in the model, then the one in the checkpoint, or nothing to '
                "start fresh."
            )
        if new in found:
            raise UsageError(f"{new!r} is given twice. Remove one of the two.")
        found[new] = old
    return found
