"""`elasticcb zoo new`: complete examples to start a project from. They are in `templates`."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.errors import UsageError

REQUIREMENTS = "requirements.txt"
_TEMPLATES = Path(__file__).parent / "templates"
# Packages that the files of each kit import and elasticcb does not install.
_IMPORTS = {"recommender": ("keras_rs",)}
KITS = tuple(_IMPORTS)


@click.command(context_settings=CONTEXT)
@click.argument("kit", type=click.Choice(KITS), metavar="KIT")
@click.argument("folder", metavar="[FOLDER]", default="")
def new(kit: str, folder: str) -> None:
    """Create a folder with model files, job files, data and a serving example, to start a project from.

    KIT is recommender: two-tower retrieval and ranking, on film ratings. FOLDER is named after the kit by default.
    Existing files are not replaced.

    \b
    Examples:
      elasticcb zoo new recommender
      elasticcb zoo new recommender films
    """
    directory = Path(folder or kit)
    sources = sorted(path for path in (_TEMPLATES / kit).iterdir() if path.is_file())
    there = [source.name for source in sources if (directory / source.name).exists()]
    if there:
        raise UsageError(
            f"{directory} already holds {', '.join(there)}, which `elasticcb zoo new {kit}` would replace. Nothing "
            "was written. Choose another folder, or move these files."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for source in sources:
            (directory / source.name).write_bytes(source.read_bytes())
            print(f"Created {directory / source.name}")
    except OSError as error:
        raise UsageError(f"{error.filename or directory} can't be written: {error.strerror}.") from None
    print(f"\nNext: cd {shlex.quote(str(directory))}, and follow README.md there")
    if not all(map(importlib.util.find_spec, _IMPORTS[kit])):
        print(f"      It needs packages that are not installed: pip install -r {REQUIREMENTS}")
