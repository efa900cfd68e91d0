"""What the site (`make docs`) does to pages that are written to be read as files, too."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The home page is README.md of the repository. Links show titles of pages instead of names of files; those to
    files outside of the documentation, which the site does not have, become plain text."""
    if page.is_homepage:
        whole = Path(config["config_file_path"]).with_name("README.md").read_text(encoding="utf-8")
        first = whole[: whole.index("\n## Documentation\n")]  # which the navigation shows
        top = re.sub(r"\]\((?!docs/)([A-Z]+(\.md)?)\)", r"](../\1)", first)
        markdown = top.replace("](docs/", "](")
    titles = dict(_titles(config["nav"]))
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
    markdown = re.sub(r"`([^`\n]*\\\|[^`\n]*)`", _code_with_pipes, markdown)
    return re.sub(r"\[(?:docs/)?(\w+\.md)\]", lambda found: f"[{titles.get(found[1], found[1])}]", markdown)


def _code_with_pipes(found: re.Match[str]) -> str:
    """Code of a table: GitHub takes the backslash before `|` away, Python-Markdown shows it."""
    return f"<code>{html.escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>"


def _titles(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """The files of pages, and their titles."""
    for entry in nav:
        for title, inside in entry.items():
            yield from _titles(inside) if isinstance(inside, list) else [(inside, title)]
