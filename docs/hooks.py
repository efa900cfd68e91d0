"""What the site (`make docs`) does to pages that are written to be read as files, too."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

_MERMAID = "https://unpkg.com/mermaid@11/dist/mermaid.min.js"  # what the theme draws diagrams with


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to what is not of the documentation become plain text: the site does not have these files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """With the environment variable MERMAID, a file mermaid.min.js, the site needs no internet to draw diagrams."""
    scripts = Path(config["site_dir"], "assets", "javascripts")
    (bundle,) = scripts.glob("bundle.*.min.js")
    code = bundle.read_text(encoding="utf-8")
    # Mermaid puts the name of the diagram in front of this id now: in the dark, arrows had dark heads.
    code = code.replace("#arrowhead path", "[id$=arrowhead] path")
    if file := os.environ.get("MERMAID"):
        shutil.copyfile(file, scripts / "mermaid.min.js")
        code = code.replace(f'"{_MERMAID}"', 'new URL("assets/javascripts/mermaid.min.js",__md_scope)')
    bundle.write_text(code, encoding="utf-8")
