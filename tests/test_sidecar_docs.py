"""The examples of docs/evaluation_beside_training.md, run in their order."""

from __future__ import annotations

from pathlib import Path

from code_blocks import code_blocks

PAGE = Path(__file__).parents[1] / "docs" / "evaluation_beside_training.md"


def test_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for example in code_blocks(PAGE):
        exec(compile(example, PAGE.name, "exec"), names)
    output = capsys.readouterr().out
    for line in ("3 001.weights.h5", "6 002.weights.h5", "9 003.weights.h5", "Version 9: accuracy"):
        assert line in output
    assert (tmp_path / "best.keras").is_file()
    assert list((tmp_path / "logs" / "validation").iterdir())
