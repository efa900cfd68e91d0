"""`elasticcb zoo init`, `zoo build` and `zoo push`; a shell script is the engine."""

from __future__ import annotations

import re

import pytest

from elasticcb import __version__
from elasticcb.cli.main import main


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTICCB_DEBUG", raising=False)
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "linear.py").write_text("")
    return folder


def put_engine(folder, monkeypatch, name, script):
    """The only command in the path."""
    commands = folder / "bin"
    commands.mkdir()
    (commands / name).write_text(f"#!/bin/sh\n{script}")
    (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))


def test_init_writes_what_a_build_needs_and_replaces_a_dockerfile_only_by_force(zoo, capsys):
    assert main(["zoo", "init", "zoo"]) == 0
    assert {path.name for path in zoo.iterdir()} == {".dockerignore", "Dockerfile", "linear.py", "requirements.txt"}
    assert "**/*.pem\n" in (zoo / ".dockerignore").read_text()
    text = (zoo / "Dockerfile").read_text()
    assert re.search(r"^FROM docker\.io/library/python:3\.\d+-slim$", text, re.MULTILINE)
    assert f"'elasticcb[kubernetes]=={__version__}'" in text
    assert text.index("pip install") < text.index("COPY --chown=1000:1000 . /model_zoo") < text.index("USER 1000:1000")
    assert "Next: elasticcb zoo build zoo --image=" in capsys.readouterr().out

    (zoo / ".dockerignore").write_text("data\n")
    (zoo / "requirements.txt").write_text("polars\n")
    assert main(["zoo", "init", "zoo"]) == 0
    assert main(["zoo", "init", "zoo", "--base_image=python:3.12"]) == 2
    assert "zoo/Dockerfile already exists" in capsys.readouterr().err
    assert (zoo / "Dockerfile").read_text() == text
    assert main(["zoo", "init", "zoo", "--base-image=python:3.12", "--force"]) == 0
    assert "\nFROM python:3.12\n" in (zoo / "Dockerfile").read_text()
    assert ((zoo / ".dockerignore").read_text(), (zoo / "requirements.txt").read_text()) == ("data\n", "polars\n")


def test_build_and_push_call_the_engine_that_is_installed(zoo, monkeypatch, capfd):
    put_engine(zoo.parent, monkeypatch, "buildah", 'echo "ran $@"\n')
    assert main(["zoo", "init", "zoo"]) == 0
    assert main(["zoo", "build", "zoo", "--image=a.example/zoo:1"]) == 0
    assert "ran build --tag=a.example/zoo:1 --file=zoo/Dockerfile zoo\n" in capfd.readouterr().out
    assert main(["zoo", "push", "a.example/zoo:1"]) == 0
    said = capfd.readouterr().out
    assert "ran push a.example/zoo:1\n" in said
    assert "--image=a.example/zoo:1 --model_zoo=/model_zoo" in said


def test_an_engine_that_fails_or_is_missing_is_told(zoo, monkeypatch, capfd):
    put_engine(zoo.parent, monkeypatch, "podman", "echo it broke; exit 3\n")
    assert main(["zoo", "push", "a.example/zoo:1"]) == 1
    said = capfd.readouterr()
    assert "it broke" in said.out
    assert "podman ended with the exit code 3" in said.err
    assert main(["zoo", "push", "a.example/zoo:1", "--engine=docker"]) == 2
    assert "docker is not installed. Install one of docker, podman, buildah." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "nowhere"], "nowhere does not exist. Expected a model zoo"),
        (["init", "zoo/linear.py"], "zoo/linear.py is a file. Expected a model zoo"),
        (["init", "data"], "data contains no Python files."),
        (["build", "zoo"], "Missing option '--image'"),
        (["build", "zoo", "--image=zoo:1"], "There is no Dockerfile in zoo. Create it with `elasticcb zoo init zoo`."),
        (["build", "zoo", "--image=zoo:1", "--engine=kaniko"], "'kaniko' is not one of"),
        (["push"], "Missing argument 'IMAGE'"),
    ],
)
def test_mistake_is_told_in_words_and_nothing_is_written(arguments, words, zoo, capsys):
    (zoo.parent / "data").mkdir()
    assert main(["zoo", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out
    assert [path.name for path in zoo.iterdir()] == ["linear.py"]
