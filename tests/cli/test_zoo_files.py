"""What `elasticcb zoo init` writes and refuses; no engine is needed."""

from __future__ import annotations

import re

import pytest
from zoo_engines import write_wheel

from elasticcb import __version__
from elasticcb.cli.image.advice import build_advice, push_advice
from elasticcb.cli.image.engine import ENGINES, NOT_INSTALLED, EngineState, digest_in, problem_of, usable
from elasticcb.cli.image.name import ImageName, parse_image
from elasticcb.cli.main import main
from elasticcb.cli.zoo.files import ZooImage, large_entries, secret_files, unpinned_bases, unpublished_source
from elasticcb.errors import UsageError

DOCKER, PODMAN, BUILDAH = ENGINES
DIGEST = "sha256:" + "0a" * 32


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTICCB_DEBUG", raising=False)
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "linear.py").write_text("")
    return folder


def test_init_writes_what_a_build_needs_and_says_what_is_next(zoo, capsys):
    assert main(["zoo", "init", "zoo"]) == 0
    assert sorted(path.name for path in zoo.iterdir()) == [
        ".dockerignore",
        "Dockerfile",
        "linear.py",
        "requirements.txt",
    ]
    text = (zoo / "Dockerfile").read_text()
    assert re.search(r"^FROM docker\.io/library/python:3\.\d+-slim$", text, re.MULTILINE)
    assert f"'elasticcb[kubernetes]=={__version__}'" in text
    assert text.index("pip install") < text.index("COPY --chown=1000:1000 . /model_zoo") < text.index("USER 1000:1000")
    assert "Next: elasticcb zoo build zoo --image=" in capsys.readouterr().out


def test_init_again_changes_nothing_and_other_flags_replace_the_dockerfile_only_by_force(zoo, capsys):
    assert main(["zoo", "init", "zoo"]) == 0
    (zoo / ".dockerignore").write_text("data\n")
    (zoo / "requirements.txt").write_text("polars\n")
    assert main(["zoo", "init", str(zoo)]) == 0
    before = (zoo / "Dockerfile").read_text()
    assert main(["zoo", "init", "zoo", "--base_image=python:3.12"]) == 2
    assert "zoo/Dockerfile already exists" in capsys.readouterr().err
    assert (zoo / "Dockerfile").read_text() == before
    assert main(["zoo", "init", "zoo", "--base-image=python:3.12", "--force"]) == 0
    assert "\nFROM python:3.12\n" in (zoo / "Dockerfile").read_text()
    assert ((zoo / ".dockerignore").read_text(), (zoo / "requirements.txt").read_text()) == ("data\n", "polars\n")


def test_local_wheels_are_copied_into_the_zoo_and_stay_there(zoo, capsys):
    write_wheel(zoo.parent / "dist", "words", "")
    assert main(["zoo", "init", "zoo", "--local_pkg_dir=dist"]) == 0
    assert (zoo / "wheels" / "words-1.0-py3-none-any.whl").exists()
    text = (zoo / "Dockerfile").read_text()
    assert "COPY wheels /requirements/wheels/\n" in text
    assert main(["zoo", "init", "zoo"]) == 0
    assert (zoo / "Dockerfile").read_text() == text


LOCKED = f"elasticcb[kubernetes]=={__version__} \\\n    --hash=sha256:{'0a' * 32}\n"


def test_a_lock_is_all_that_is_installed_and_by_its_hashes(zoo, capsys):
    assert main(["zoo", "init", "zoo"]) == 0
    told = capsys.readouterr().out
    assert f"echo 'elasticcb[kubernetes]=={__version__}' | uv pip compile --generate-hashes" in told
    assert "--index" not in told
    assert main(["zoo", "init", "zoo", "--force", "--extra_pypi_index=https://more.example/simple"]) == 0
    assert " --index=https://more.example/simple --output-file=" in capsys.readouterr().out
    (zoo / "requirements.lock").write_text(LOCKED)
    write_wheel(zoo.parent / "dist", "words", "")
    given = ["--force", "--local_pkg_dir=dist", "--extra_pypi_index=https://more.example/simple"]
    assert main(["zoo", "init", "zoo", *given]) == 0
    text = (zoo / "Dockerfile").read_text()
    (install,) = re.findall(r"^RUN python -m pip install(?:.*\\\n)*.*$", text, re.MULTILINE)
    assert re.sub(r"\s*\\\n\s*", " ", install).split()[5:] == [
        "--no-cache-dir", "--require-hashes", "--find-links=/requirements/wheels",
        "--extra-index-url=https://more.example/simple", "-r", "/requirements/requirements.lock",
    ]  # fmt: skip
    assert "COPY requirements.lock /requirements/" in text
    assert "uv pip compile" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", f"elasticcb=={__version__}\n", LOCKED.replace(__version__, "0.0.1")])
def test_a_lock_without_this_elasticcb_and_its_hashes_is_refused(zoo, capsys, text):
    (zoo / "requirements.lock").write_text(text)
    assert main(["zoo", "init", "zoo", "--extra_pypi_index=https://more.example/a?b&c"]) == 2
    message = capsys.readouterr().err
    assert "does not lock elasticcb" in message
    assert "uv pip compile --generate-hashes" in message
    assert " --index='https://more.example/a?b&c' " in message
    assert not (zoo / "Dockerfile").exists()


def test_base_images_without_a_digest_are_found():
    text = f"""\
ARG BASE=a:1
FROM docker.io/library/python:3.12-slim AS wheels
from --platform=linux/amd64 b.example/c as Second
FROM wheels
FROM second
FROM scratch
FROM ${{BASE}}
FROM d.example/e:1@{DIGEST}
FROM b.example/c
"""
    assert unpinned_bases(text) == ["docker.io/library/python:3.12-slim", "b.example/c"]
    assert not unpinned_bases(ZooImage(f"python@{DIGEST}").dockerfile())


def put_engine(commands, monkeypatch, script):
    """A podman, and no other command, that a shell script is."""
    commands.mkdir()
    (commands / "podman").write_text(f"#!/bin/sh\n{script}")
    (commands / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))


@pytest.mark.parametrize(("prints", "pinned"), [(DIGEST, DIGEST), ("", "sha256:…")])
def test_build_warns_of_a_base_without_digest_and_of_a_lock_that_is_not_used(zoo, capfd, monkeypatch, prints, pinned):
    asked = "image inspect --format={{.Digest}} python:3.12-slim"
    put_engine(zoo.parent / "bin", monkeypatch, f'[ "$1 $2 $3 $4" = "{asked}" ] && echo "{prints}"\nexit 0\n')
    assert main(["zoo", "init", "zoo", "--base_image=python:3.12-slim"]) == 0
    (zoo / "requirements.lock").write_text(LOCKED)
    assert main(["zoo", "build", "zoo", "--image=zoo:1", "--engine=podman"]) == 0
    out = capfd.readouterr().out
    assert "requirements.lock exists, but zoo/Dockerfile does not use it" in out
    assert "names its base image by a tag, python:3.12-slim, which may point to another image later." in out
    assert f"To pin it, write FROM python@{pinned}" in out
    assert ("podman image inspect" in out) == (prints == "")
    assert main(["zoo", "init", "zoo", "--force", f"--base_image=python@{DIGEST}"]) == 0
    capfd.readouterr()
    assert main(["zoo", "build", "zoo", "--image=zoo:1", "--engine=podman"]) == 0
    assert "Warning" not in capfd.readouterr().out


def test_extra_index_is_quoted_for_the_shell():
    text = ZooImage("python:3.12", extra_pypi_index="https://a.example/simple?a=1&b=$x").dockerfile()
    assert "--extra-index-url='https://a.example/simple?a=1&b=$x' \\\n" in text


def test_extra_index_replaces_no_package_that_the_usual_one_has_given():
    text = ZooImage("python:3.12", extra_pypi_index="https://a.example/simple", wheels=True).dockerfile()
    first, keep, second = re.findall(r"^RUN ((?:.*\\\n)*.*)", text, re.M)
    assert "elasticcb[kubernetes]" in first
    assert "a.example" not in first
    assert keep == "python -m pip list --format=freeze > /requirements/installed.txt"
    assert "--constraint=/requirements/installed.txt" in second
    assert "-r /requirements/requirements.txt" in second


def test_files_that_look_like_secrets_are_left_out_by_the_dockerignore_that_is_written(zoo, capsys):
    for name in ("key.pem", ".env", "sub/.env.local", "sub/id_rsa", "aws_credentials.csv", "tokenizer.json"):
        (zoo / name).parent.mkdir(exist_ok=True)
        (zoo / name).write_text("hush")
    found = [".env", "aws_credentials.csv", "key.pem", "sub/.env.local", "sub/id_rsa"]
    assert secret_files(zoo, "") == found
    assert secret_files(zoo, "sub\n*.pem\n") == found[:2]
    assert secret_files(zoo, "id_rsa\n*.csv\n/key.pem") == [".env", "sub/.env.local", "sub/id_rsa"]
    assert main(["zoo", "init", "zoo"]) == 0
    assert secret_files(zoo, (zoo / ".dockerignore").read_text()) == []


def write_secrets(zoo, *names):
    for name in names:
        (zoo / name).parent.mkdir(parents=True, exist_ok=True)
        (zoo / name).write_text("hush")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("!key.pem", ["key.pem"]),
        ("!*.pem", ["key.pem"]),
        ("! /key.pem/", ["key.pem"]),
        ("!**/*.pem", ["key.pem", "sub/deep/key.pem"]),
        ("!sub/deep", ["sub/deep/key.pem"]),
        ("!.ssh/config", [".ssh/config"]),
        ("!.ssh", [".ssh"]),
        ("!k?y.*", ["key.pem"]),
        ("# !key.pem", []),
        ("!key.pem\n*.pem", []),
        ("!**\nsub\n.ssh/**\n*.pem", []),
        ("!**\n*\n!*.py", []),
    ],
)
def test_build_warns_of_secrets_that_a_later_line_of_the_dockerignore_takes_in_again(
    zoo, capfd, monkeypatch, lines, found
):
    write_secrets(zoo, "key.pem", "sub/deep/key.pem", ".ssh/config")
    assert main(["zoo", "init", "zoo"]) == 0
    with (zoo / ".dockerignore").open("a") as file:
        file.write(lines)
    put_engine(zoo.parent / "bin", monkeypatch, "exit 0\n")
    capfd.readouterr()
    assert main(["zoo", "build", "zoo", "--image=zoo:1", "--engine=podman"]) == 0
    assert re.findall(r"zoo/(\S+) may contain secrets", capfd.readouterr().out) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "nowhere"], "There is no folder nowhere."),
        (["init", "zoo/linear.py"], "zoo/linear.py is a file. Expected a model zoo"),
        (["init", "data"], "data contains no Python files."),
        (["init", "zoo", "--base_image=Python:3.12"], "use lowercase letters. Expected a name such as docker.io/"),
        (["init", "zoo", "--base_image=https://hub.docker.com/_/python"], "but a URL"),
        (["init", "zoo", "--base_image=a\nRUN b"], "is not the name of an image"),
        (["init", "zoo", "--extra_pypi_index=packages.example"], "is not the URL of a package index"),
        (["init", "zoo", "--extra_pypi_index=https://jo:secret@packages.example"], "contains a user or a password"),
        (["init", "zoo", "--local_pkg_dir=dist"], "--local_pkg_dir=dist is not a folder."),
        (["init", "zoo", "--local_pkg_dir=data"], "a folder without wheels"),
        (["build", "zoo"], "Missing option '--image'"),
        (["build", "zoo", "--image=zoo:1"], "There is no Dockerfile in zoo. Create it with `elasticcb zoo init zoo`."),
        (["build", "zoo", "--image=Zoo:1"], "use lowercase letters"),
        (["build", "zoo", f"--image=zoo@{DIGEST}"], "has a digest, which only the registry can assign"),
        (["build", "zoo", "--image=zoo:1", "--engine=kaniko"], "'kaniko' is not one of"),
        (["build", "zoo", "--image=zoo:1", "--engine_flags='"], "can't be parsed"),
        (["push", "zoo:1"], "zoo:1 contains no registry to push to."),
        (["push"], "Missing argument 'IMAGE'"),
    ],
)
def test_mistake_is_told_in_words_and_nothing_is_written(arguments, words, zoo, capsys):
    (zoo.parent / "data").mkdir()
    assert main(["zoo", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "secret" not in said.err
    assert not said.out
    assert [path.name for path in zoo.iterdir()] == ["linear.py"]


def test_lines_of_requirements_that_an_image_can_not_install_are_named(zoo, capsys):
    lines = [
        "numpy>=2",
        "-e .",
        "elasticcb @ file:///home/jo/elasticcb",
        "-r other.txt",
        "../words",
        "a # file:x",
        "-e git+x",
    ]
    (zoo / "requirements.txt").write_text("\n".join(lines))
    for command in (["init", "zoo"], ["build", "zoo", "--image=zoo:1"]):
        (zoo / "Dockerfile").write_text("FROM python:3.12\n")
        assert main(["zoo", *command]) == 2
        said = capsys.readouterr().err
        assert re.findall(r"requirements.txt:(\d+): ", said) == ["2", "3", "4", "5", "7"]
        assert "names another file" in said.splitlines()[2]


def test_two_wheels_of_one_package_are_refused(zoo, capsys):
    write_wheel(zoo.parent / "dist", "my_words", "")
    (zoo / "wheels").mkdir()
    (zoo / "wheels" / "My.Words-0.9-py3-none-any.whl").write_bytes(b"")
    assert main(["zoo", "init", "zoo", "--local_pkg_dir=dist"]) == 2
    assert "are wheels of the same package" in capsys.readouterr().err


def test_large_entries_are_those_that_dockerignore_does_not_name(zoo):
    for name, size in (("data", 30), ("logs", 50), (".git", 70), ("small", 5)):
        (zoo / name).mkdir()
        (zoo / name / "a").write_bytes(b"x" * size)
    (zoo / "model.tar").write_bytes(b"x" * 90)
    assert large_entries(zoo, "# logs\n.git\n*.tar\n!x\n", 20) == [("logs", 50), ("data", 30)]
    assert large_entries(zoo, "/data/\n**/logs\n.git/**\nmodel.*\n", 20) == []


def test_source_of_this_installation_is_a_folder_or_unknown():
    assert unpublished_source() == "" or unpublished_source().startswith("/")


@pytest.mark.parametrize(
    ("text", "parts", "full"),
    [
        ("zoo", ImageName("", "zoo"), "zoo"),
        ("zoo:1", ImageName("", "zoo", "1"), "zoo:1"),
        ("jo/zoo:1", ImageName("", "jo/zoo", "1"), "docker.io/jo/zoo:1"),
        ("localhost/zoo", ImageName("localhost", "zoo"), "localhost/zoo"),
        ("10.0.0.1:5000/a/b:v1.2_x", ImageName("10.0.0.1:5000", "a/b", "v1.2_x"), "10.0.0.1:5000/a/b:v1.2_x"),
        ("[::1]:5000/zoo", ImageName("[::1]:5000", "zoo"), "[::1]:5000/zoo"),
        (f"a.example/zoo@{DIGEST}", ImageName("a.example", "zoo", "", DIGEST), "a.example/zoo"),
        *((bad, None, "") for bad in ("", "zoo:", "-zoo", "a b", "Zoo", "a.example/", "http://a/b", "a.io/Zoo", "b\n")),
    ],
)  # fmt: skip
def test_name_of_an_image_is_read_as_registries_read_it(text, parts, full):
    assert parse_image(text) == parts
    assert parts is None or parts.full == full


def test_first_engine_that_works_is_taken_and_else_all_are_told_with_their_reasons():
    daemon = problem_of(
        DOCKER, "Client:\n Version: 28\nCannot connect to the Docker daemon. Is the docker daemon running?\n"
    )
    assert usable([EngineState(DOCKER, daemon), EngineState(PODMAN), EngineState(BUILDAH)]) == [PODMAN, BUILDAH]
    with pytest.raises(UsageError) as error:
        usable([EngineState(DOCKER, daemon), EngineState(PODMAN, NOT_INSTALLED)])
    assert "docker: Cannot connect to the Docker daemon. Is the docker daemon running?\n" in str(error.value)
    assert "podman: it is not installed\nFix docker (`docker version" in str(error.value)
    with pytest.raises(UsageError, match=r"--engine=podman can't be used: it is not installed\. Install one"):
        usable([EngineState(PODMAN, NOT_INSTALLED)])
    assert problem_of(BUILDAH, "\n") == "`buildah info` failed"


def test_commands_of_engines(tmp_path):
    image = ImageName("a.example", "zoo", "1")
    assert DOCKER.build(tmp_path, tmp_path / "Dockerfile", image, ["--no-cache"]) == [
        "docker", "build", "--tag=a.example/zoo:1", f"--file={tmp_path}/Dockerfile", "--no-cache", str(tmp_path),
    ]  # fmt: skip
    assert DOCKER.push(image, tmp_path / "digest", []) == ["docker", "push", "a.example/zoo:1"]
    assert PODMAN.push(image, tmp_path / "digest", ["--quiet"]) == [
        "podman", "push", f"--digestfile={tmp_path}/digest", "--quiet", "a.example/zoo:1",
    ]  # fmt: skip
    assert digest_in(["a: Pushed", f"1: digest: {DIGEST} size: 1365"]) == DIGEST
    assert digest_in(["nothing"]) == ""
    assert image.at(DIGEST) == f"a.example/zoo@{DIGEST}"


# What engines and pip have said.
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ERROR: No matching distribution found for elasticcb==0.1.0", "Build a wheel of your checkout"),
        ("ERROR: No matching distribution found for polar", "Check its name and version"),
        ("/bin/sh: 1: python: not found", "no `python` with pip"),
        ("/usr/bin/python: No module named pip", "no `python` with pip"),
        ("error: externally-managed-environment", "refuses packages"),
        ("ERROR: a-1.0-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform.", "version or platform"),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", "Relax the versions"),
        ("write /usr/lib/libcuda.so: no space left on device", "`docker image prune`"),
        ("toomanyrequests: You have reached your pull rate limit.", "choose a mirror"),
        ("error running container: from /usr/bin/crun creating container for [/bin/sh]", "BUILDAH_ISOLATION=chroot"),
        ("exec /bin/sh: exec format error", "--engine_flags=--platform"),
        ("pull access denied for nothing, repository does not exist or may require 'docker login'", "can't be pulled"),
        ("Error: creating build container: initializing source docker://a:1: manifest unknown", "can't be pulled"),
        ("dial tcp: lookup registry.example on 10.0.0.2:53: no such host", "can't be reached"),
        ('COPY failed: file not found in build context: stat wheels: file does not exist', "excludes it"),
        ("ERROR: failed to compute cache key: \"/wheels\": not found", "excludes it"),
        ("it broke", ""),
    ],
)  # fmt: skip
def test_build_that_fails_comes_with_advice(line, words):
    advice = build_advice(["STEP 1/8", line], "docker", "zoo")
    assert words in advice
    assert bool(words) == bool(advice)
    assert "{" not in advice


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("http: server gave HTTP response to HTTPS client", "does not support TLS"),
        ("x509: certificate signed by unknown authority", "does not trust the certificate"),
        ("dial tcp: lookup a.example: no such host", "unknown or unreachable"),
        ("dial tcp 127.0.0.1:5000: connect: connection refused", "Nothing listens at a.example"),
        ("name unknown: The repository with name 'zoo' does not exist in the registry", "Create it there first"),
        ("denied: requested access to the resource is denied", "`docker login a.example`"),
        ("no basic auth credentials", "`docker login a.example`"),
        ("unknown shorthand flag: 'q' in -q", "in --engine_flags"),
        ("it broke", ""),
    ],
)
def test_push_that_fails_comes_with_advice(line, words):
    advice = push_advice([line], "docker", "a.example")
    assert words in advice
    assert bool(words) == bool(advice)
