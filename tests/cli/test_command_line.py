"""The command as the shell sees it, and its documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reference import TABLES, update

import elasticcb
from elasticcb.cli.command import BASIC, help_of, metavar_of, options_of
from elasticcb.cli.main import elasticcb as group
from elasticcb.cli.main import main
from elasticcb.errors import ElasticCBError, ExitCode, JobInterrupted, ModelFileError
from elasticcb.settings.definition import ALL

REPOSITORY = Path(elasticcb.__file__).parent.parent


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticcb", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_help_and_version_end_well():
    result = shell("--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"elasticcb, version {elasticcb.__version__}")
    result = shell()
    assert result.returncode == ExitCode.DONE
    for command in ("train", "evaluate", "predict", "table", "master", "ps", "worker"):
        assert command in result.stdout


def test_an_argument_that_is_no_text_is_told():
    result = shell("train", os.fsdecode(b"--model_zoo=/\xff"))
    assert result.returncode == ExitCode.WRONG_USAGE
    assert result.stderr.startswith(r"Error: The argument b'--model_zoo=/\xff' is not valid UTF-8.")


def test_output_that_finds_no_room_changes_neither_the_exit_code_nor_what_is_done(tmp_path):
    with open("/dev/full", "w") as full:
        code = subprocess.run([sys.executable, "-m", "elasticcb", "train"], stdout=full, stderr=full).returncode
    assert code == ExitCode.WRONG_USAGE


def test_a_traceback_is_shown_to_those_who_ask(tmp_path):
    for flags, environment in (([], {"ELASTICCB_DEBUG": "1"}), (["--log-level=debug"], {})):
        result = shell("train", f"--model_zoo={tmp_path}", *flags, **environment)
        assert result.returncode == ExitCode.WRONG_USAGE
        assert "Traceback" in result.stderr


def test_checking_flags_imports_neither_tensorflow_nor_keras_nor_grpc():
    code = (
        "import sys; from elasticcb.cli.main import main\n"
        "codes = [main(['--help']), main(['train', '--help']), main(['train', '--num_ps=0'])]\n"
        "heavy = {'tensorflow', 'keras', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if heavy or codes != [0, 0, 2] else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", sorted(ALL))
def test_help_shows_the_twenty_flags_that_most_jobs_need_and_how_to_see_all(command, capsys):
    assert main([command.value, "--help"]) == ExitCode.DONE
    text = capsys.readouterr().out
    shown = re.findall(r"^│ --(\w+)", text, re.MULTILINE)
    assert set(shown) - {"config", "help"} == {option.name for option in options_of([command])} & BASIC
    assert len(shown) - 2 <= 20  # --help-all and --help
    assert f"--help-all      Show all {len(options_of([command]))} flags" in text


@pytest.mark.parametrize("command", sorted(ALL))
def test_help_is_grouped_and_states_every_flag_with_its_default(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main([command.value, "--help-all"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "Examples" in text
    for option in options_of([command]):
        assert f"─ {option.panel} ─" in text
        start = re.compile(rf"│ +--{option.name}[ ,]")
        line = next(line for line in text.splitlines() if start.match(line))
        assert metavar_of(option) in line
        assert help_of(option)[:40] in line
        if option.default is not None:
            assert f"[default: {option.default}]" in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ElasticCBError("it broke"), 1),
        (ModelFileError("it broke", "Traceback (of the user)\n  File model.py"), 1),
        (JobInterrupted("it broke"), 130),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("it broke"), 1),
    ],
)
def test_how_a_command_ends_gives_the_exit_code(error, code, capsys, monkeypatch):
    def end() -> None:
        raise error

    monkeypatch.setattr(group.commands["ps"], "callback", lambda **_: end())
    monkeypatch.delenv("ELASTICCB_DEBUG", raising=False)
    assert main(["ps", "--master=localhost:1"]) == code
    text = capsys.readouterr().err
    # The project's traceback is for the project's own faults.
    assert ("Traceback (most recent call last)" in text) == isinstance(error, ZeroDivisionError)
    assert "it broke" in text or text.strip() == "Interrupted."
    if isinstance(error, ModelFileError):
        assert text.endswith("File model.py\n")


def test_the_tables_in_the_docs_are_those_of_the_code():
    marks = []
    for name in ("cli.md", "python_api.md", "embeddings.md", "metrics.md", "serving.md"):
        page = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        assert page == update(page), "run: python lint/reference.py docs/*.md"
        # What stands between "begin" and "end" is of benchmarks.
        marks += re.findall(r"^<!-- (?!begin |end )(.+) -->$", page, re.MULTILINE)
    assert sorted(marks) == sorted(TABLES)
