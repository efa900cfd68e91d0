"""The tables of docs/cli.md, made from the tables of the code.

`python -m elasticcb.cli.reference docs/cli.md` brings the page up to date; a test fails while it is not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from elasticcb.cli.options import OPTIONS
from elasticcb.errors import ExitCode
from elasticcb.settings import Command
from elasticcb.settings.definition import ALL, PANELS

_MEANINGS = {
    ExitCode.DONE: "The job did what it should.",
    ExitCode.JOB_FAILED: "The job failed: the model file, the data, a callback, or processes that were lost; or the "
    "job is done but for its last checkpoint; or an image could not be built or pushed.",
    ExitCode.WRONG_USAGE: "Flags or the config file are wrong or contradict each other; nothing was started.",
    ExitCode.INTERRUPTED: "Interrupted with Ctrl-C.",
}


def options_tables() -> str:
    """One Markdown table for each group of flags, as `--help` groups them."""
    return "\n\n".join(f"### {panel}\n\n{_options_table(panel)}" for panel in PANELS)


def exit_codes_table() -> str:
    rows = [f"| {code.value} | `{code.name}` | {_MEANINGS[code]} |" for code in ExitCode]
    return "\n".join(["| code | name | when |", "|---|---|---|", *rows])


def _options_table(panel: str) -> str:
    rows = []
    for option in OPTIONS:
        if option.panel != panel:
            continue
        flags = ", ".join(f"`--{name}`" for name in (option.name, *option.aliases))
        default = option.default_text or ("" if option.default is None else f"`{option.default}`")
        commands = "all" if option.commands == ALL else _commands(option.commands)
        value = option.metavar.replace("|", "\\|")
        rows.append(f"| {flags} | `{value}` | {default} | {commands} | {option.help} |")
    return "\n".join(["| flag | value | default | commands | what it does |", "|---|---|---|---|---|", *rows])


def _commands(commands: frozenset[Command]) -> str:
    return ", ".join(command.value for command in Command if command in commands)


TABLES: dict[str, Callable[[], str]] = {"options": options_tables, "exit codes": exit_codes_table}


def update(page: str) -> str:
    """`page` with what stands between its `<!-- NAME -->` and `<!-- end of NAME -->` marks made anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"The page needs the marks {start.strip()} and {end.strip()}, once each.")
        page = page.replace(pattern.findall(page)[0], start + table() + end)
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
