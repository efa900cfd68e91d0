"""Tables of results: printed, and put into a page of the documentation where its markers are."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
from pathlib import Path


def table_parser(documentation: str) -> argparse.ArgumentParser:
    """The arguments of a program that publishes a table: `--into`, to which it adds its own."""
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--into", type=Path, help="page that gets the table between its markers")
    return parser


def publish(name: str, text: str, into: Path | None) -> None:
    """Prints `text`, and puts it between `<!-- begin NAME -->` and `<!-- end NAME -->` of a page.

    Raises `SystemExit` when the page has no such markers.
    """
    print(f"\n{text}", flush=True)
    if into is None:
        return
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found, rest = into.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{into} has no lines {begin} and {end}; the table is printed above.")
    into.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def machine() -> str:
    """What it ran on, in words: "2 virtual cores (AMD EPYC), Python 3.11, tensorflow 2.21.0, keras 3.15.1"."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kind = " ".join(found[1].split()[:2]) if found else platform.machine()
    versions = []
    for package in ("tensorflow", "keras", "tf_keras", "torch", "torchrec"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    return f"{cores} virtual cores ({kind}), Python {platform.python_version()}, {', '.join(versions)}"
