"""Reports wording that the project avoids, in its pages and in the comments and strings of its Python files.

proselint finds it, by the rules of `prose.yaml`, in text of which code is replaced by "·": blocks and spans of code in
Markdown, and all of Python but comments and strings. Lines keep their numbers.
"""

import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from proselint.checks import __register__ as proselint_checks
from proselint.config import Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags
from proselint.registry.checks.engine import Fancy, RegexOptions
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
CODE = "·"
# Between words: at most one line break, since a blank line ends a paragraph.
SPACE = r"(?:[ \t]+|[ \t]*\n[ \t]*)"
# From Python 3.12 on, f-strings are several tokens; before, they are of type STRING.
QUOTES = [getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END")]
STRINGS = [tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None), *QUOTES]


def check_of(rule: dict[str, Any]) -> Check:
    """A rule of `prose.yaml`, for proselint."""
    patterns = "|".join(rule["instead_of"]).replace(" ", SPACE)
    return Check(
        check_type=ExistenceSimple(rf"(?<!\w)(?:{patterns})(?!\w)", exceptions=tuple(rule.get("except", ()))),
        engine=Fancy(RegexOptions(multi_line=True)),
        path=f"house.{rule['rule']}",
        message=f"'{{}}'; write: {rule['write']}.",
        flags=CheckFlags(allow_quotes=True),
    )


RULES = yaml.safe_load(Path(__file__).with_name("prose.yaml").read_text(encoding="utf-8"))
CONFIG = Config(max_errors=10**6, checks={**RULES["proselint"], "house": True})
CheckRegistry().register_many((*proselint_checks, *map(check_of, RULES["rules"])))


def text_of_page(source: str) -> str:
    """The text of a Markdown page, each word on its line."""
    lines = [""] * (source.count("\n") + 1)
    for block in MarkdownIt("commonmark").enable("table").parse(source):
        if block.type != "inline" or block.map is None:
            continue
        words = []
        for part in block.children or ():
            if part.type in ("softbreak", "hardbreak"):
                words.append("\n")
            elif part.type == "code_inline":
                words.append(CODE)
            elif part.type == "text":
                words.append(part.content)
        # A paragraph or a cell ends with "·"; cells of a table's row share a line.
        for number, text in enumerate(f"{''.join(words)} {CODE} ".split("\n"), start=block.map[0]):
            lines[number] += text
    return "\n".join(lines)


def text_of_program(source: str) -> str:
    """Comments and strings of a Python file, where they are; "·" for each other character."""
    lines = [re.sub(r"\S", CODE, line) for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in STRINGS:
            continue
        (row, column), (first, *others) = token.start, words_of(token).split("\n")
        line = lines[row - 1]
        lines[row - 1] = line[:column] + first + line[column + len(first) :]
        for number, text in enumerate(others, start=row):
            # A blank line ends a paragraph.
            lines[number] = text + lines[number][len(text) :] if text.strip() else CODE
    return "\n".join(lines)


def words_of(token: tokenize.TokenInfo) -> str:
    """A comment or a string without its marks, and with "·" for each character of code, at the same length."""
    text = token.string
    if token.type in QUOTES:
        return " " * len(text)
    if token.type == tokenize.COMMENT:
        text = text.replace("#", " ", 1)
    if token.type == tokenize.STRING and (literal := re.fullmatch(r"(\w*(\"\"\"|'''|\"|'))(.*)\2", text, re.DOTALL)):
        opening, quotes, text = literal.groups()
        text = " " * len(opening) + text + " " * len(quotes)
    return re.sub(r"`[^`\n]+`|\{[^{}\n]*\}", lambda code: CODE * len(code[0]), text)


def findings(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Lines, from 1, and what is wrong there, in a file of that name."""
    text = text_of_program(source) if name.endswith(".py") else text_of_page(source)
    for found in LintFile(name, text or CODE).lint(CONFIG):
        check = found.check_result
        yield found.pos[0], f"{check.check_path}: {' '.join(check.message.split())}"


def files() -> list[Path]:
    """All that is checked: pages and programs, but for tests and what is generated."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    folders = (ROOT / name for name in ("elasticcb", "benchmarks", "model_zoo"))
    programs = [path for folder in folders for ending in ("md", "py") for path in folder.rglob(f"*.{ending}")]
    return sorted(path for path in (*pages, *programs) if "_pb2" not in path.name)


def main(names: list[str]) -> int:
    """Checks the files of these names, by default all; the exit code."""
    found = False
    for path in map(Path, names) if names else files():
        for line, what in findings(path.name, path.read_text(encoding="utf-8")):
            print(f"{os.path.relpath(path)}:{line}: {what}")
            found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
