"""What the site (`make docs`) does to pages that are written to be read as files, too."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to what is not of the documentation become plain text: the site does not have these files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
