"""What README.md and docs/ say: links lead somewhere, the protocol is described whole. Their examples are run by
tests/integration/test_examples_of_the_docs.py."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import elasticcb
from code_blocks import without_code_blocks
from elasticcb import errors

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def titles(page: Path) -> set[str]:
    """The anchors of a page's titles, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", without_code_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_titles_that_are_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in titles(linked), f"{page.name} links to {target}; {linked.name} has no such title"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_split_by_an_empty_line(page):
    text = without_code_blocks(page)
    assert not re.findall(r"^\|.*\n\n(\|.*)\n(?!\|[-| :]+\|$)", text, re.MULTILINE)


def test_index_of_the_docs_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index]
    assert missing in ([], ["README.md"])


def test_errors_that_the_docs_name_can_be_imported_from_the_package():
    own = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    named = own & {word for page in PAGES for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    assert "UsageError" in named
    assert not [name for name in named if getattr(elasticcb, name, None) is not getattr(errors, name)]


def test_wire_protocol_mentions_everything_of_the_proto():
    proto = re.sub(r"//.*", "", (ROOT / "proto" / "elasticcb.proto").read_text(encoding="utf-8"))
    names = re.findall(r"\b(?:rpc|message|enum|service) (\w+)", proto)
    for body in re.findall(r"\benum \w+ \{(.*?)\}", proto, re.DOTALL):
        names += [value for value in re.findall(r"(\w+) =", body) if not value.endswith("UNSPECIFIED")]
    page = (ROOT / "docs" / "wire_protocol.md").read_text(encoding="utf-8")
    assert "`CALLRequest` and `CALLResponse`" in page
    own = {f"{call}{kind}" for call in re.findall(r"\brpc (\w+)", proto) for kind in ("Request", "Response")}
    names = [name for name in names if name not in own]
    assert not [name for name in names if not re.search(rf"`{name}\b", page)]


def test_wire_protocol_says_what_a_repeated_call_of_a_server_does():
    proto = (ROOT / "proto" / "elasticcb.proto").read_text(encoding="utf-8")
    (service,) = re.findall(r"\nservice ParameterServer \{(.*?)\n\}", proto, re.DOTALL)
    page = (ROOT / "docs" / "wire_protocol.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"\n### Repeating a call of a server\n(.*?)\n### ", page, re.DOTALL)
    calls = [row.split("|")[1] for row in section.splitlines() if row.startswith("|")]
    named = [name for cell in calls for name in re.findall(r"`(\w+)`", cell)]
    assert set(named) == set(re.findall(r"\brpc (\w+)", service))


def test_readme_states_the_versions_of_the_package():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    bounds = textwrap.dedent(
        """
        requires-python = ">=3.10,<3.14" | Python 3.10 to 3.13
        "tensorflow>=2.20,<2.22" | TensorFlow 2.20 and 2.21
        "keras>=3.11,<3.16" | Keras 3.11 to 3.15
        "protobuf>=6.31.1,<8" | protobuf 6 and 7
        """
    ).strip()
    for bound in bounds.splitlines():
        given, said = bound.split(" | ")
        assert given in project, f"{given} has changed; so must the README, and this test"
        assert said in readme
