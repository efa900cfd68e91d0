"""The fenced code blocks of Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def code_blocks(page: Path, opening: str = "python") -> list[Any]:
    """The blocks of a page, as `re.findall` returns them. `opening` is a pattern of what precedes them: the language,
    and possibly first lines."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{opening}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_code_blocks(page: Path) -> str:
    """The text of a page."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
