"""The prose linter, lint/prose.py: what `make lint` finds in pages and programs."""

import pathlib

import pytest

import prose

PATTERNS = [(rule, pattern) for rule in prose.RULES["rules"] for pattern in rule["instead_of"]]


@pytest.mark.parametrize(("rule", "pattern"), PATTERNS, ids=[pattern for _, pattern in PATTERNS])
def test_each_pattern_finds_its_own_sentence(rule, pattern):
    sentence = rule["instead_of"][pattern]
    alone = prose.check_of({**rule, "instead_of": {pattern: sentence}})
    assert list(alone.check(prose.text_of_page(sentence)))
    assert any(what.startswith(f"house.{rule['rule']}: ") for _, what in prose.findings("page.md", sentence))


@pytest.mark.parametrize(
    "sentence",
    [
        "It leaves the files of the user alone.",
        "There is no YAML in it, and a second server is no faster.",
        "It has so many files that it can't be read.",
        "A pod that has lost its Lease ends.",
        "The worker writes the file and continues.",
        "Nothing stands in the way, and a dict may stand in for a list.",
    ],
)
def test_plain_sentences_are_left_as_they_are(sentence):
    assert not list(prose.findings("page.md", sentence))


def test_findings_of_a_page_have_their_lines_and_code_is_not_read():
    page = "# Begins anew\n\nThe job goes\non, `it goes on`.\n\n```\ngoes on\n```\n\n"
    page += "| a | b |\n|---|---|\n| x | by hand, anew |\n"
    lines = [(line, what.split(";")[0]) for line, what in prose.findings("page.md", page)]
    assert lines == [
        (1, "house.again: 'anew'"),
        (3, "house.continue: 'goes on'"),
        (12, "house.manually: 'by hand'"),
        (12, "house.again: 'anew'"),
    ]


def test_comments_and_strings_of_a_program_are_read_and_names_are_not():
    program = (
        '"""Begins anew.\n\nIt goes\n\non."""\n'
        "anew = 1  # by\n"
        "# hand\n"
        'print("may go "\n'
        '      f"on {anew}", "goes", "on")\n'
    )
    lines = [(line, what.split(";")[0]) for line, what in prose.findings("program.py", program)]
    assert lines == [
        (1, "house.again: 'anew'"),
        (6, "house.manually: 'by hand'"),
        (8, "house.continue: 'go on'"),
    ]


def test_a_finding_is_shown_with_its_place_and_fails_the_check(tmp_path: pathlib.Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.md").write_text("All is well.\n")
    (tmp_path / "bad.md").write_text("Mend\nthat line.\n")
    assert prose.main(["good.md"]) == 0
    assert prose.main(["good.md", "bad.md"]) == 1
    assert capsys.readouterr().out == "bad.md:1: house.fix: 'Mend'; write: fix.\n"
    assert prose.ROOT / "README.md" in prose.files()
