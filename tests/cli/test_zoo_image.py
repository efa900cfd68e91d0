"""`elasticcb zoo` with real engines and a real registry: from a folder of model files to a pushed image."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request

import pytest
from zoo_engines import BASE, make_engine, registry, write_wheel

import elasticcb
from elasticcb.cli.image.engine import NAMES
from elasticcb.cli.main import main

MANIFESTS = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(scope="module", params=NAMES)
def engine(request, tmp_path_factory, address):
    return make_engine(request.param, tmp_path_factory.mktemp(request.param), address)


@pytest.fixture
def command(engine, monkeypatch, capfd):
    """Runs `elasticcb zoo` with that engine: the exit code, and what it says."""
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ELASTICCB_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["zoo", *arguments, *([] if arguments[0] == "init" else [f"--engine={engine.name}"])])
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def zoo(tmp_path):
    folder = tmp_path / "zoo"
    (folder / "flowers" / "__pycache__").mkdir(parents=True)
    (folder / "flowers" / "iris.py").write_text("import words\n")
    (folder / "flowers" / "iris.py").chmod(0o600)
    (folder / "flowers" / "__pycache__" / "iris.pyc").write_bytes(b"")
    return folder


def test_image_is_built_and_pushed_and_the_registry_has_it_under_the_digest_that_is_told(command, engine, zoo, address):
    image = f"{address}/team/{engine.name}:1"
    (zoo / "Dockerfile").write_text("FROM scratch\nCOPY . /model_zoo\n")
    code, said = command("push", image)
    assert code == 2
    assert f"To build it: elasticcb zoo build DIR --image={image}" in said
    code, said = command("build", str(zoo), f"--image={image}")
    assert code == 0, said
    assert f"Next: elasticcb zoo push {image}" in said

    code, said = command("push", image)
    assert code == 1
    assert f"`{engine.name} login {address}`" in said
    engine.log_in(address)
    code, said = command("push", image)
    assert code == 0, said
    assert (
        f"Next: elasticcb train --cluster=kubernetes --namespace=… --service_account=elasticcb --image={image}" in said
    )
    ((name, digest),) = re.findall(r"--image=(\S+)@(sha256:\w+)", said)
    assert name == f"{address}/team/{engine.name}"
    config = json.loads((engine.folder / "config.json").read_text())
    headers = {"Authorization": f"Basic {config['auths'][address]['auth']}", "Accept": MANIFESTS}
    request = urllib.request.Request(f"http://{address}/v2/team/{engine.name}/manifests/{digest}", headers=headers)
    with urllib.request.urlopen(request) as answer:
        assert len(json.load(answer)["layers"]) == 1
    engine.run("rmi", image)  # docker's store is not the test's own


def test_user_of_a_zoos_image_reads_the_models_and_imports_what_they_need(command, engine, zoo, tmp_path):
    if engine.name == "podman" and shutil.which("buildah"):
        pytest.skip("buildah, by which podman builds, is here")
    engine.make_base_image()
    write_wheel(tmp_path / "dist", "words", "WORDS = 'of a local wheel'")
    code, said = command("init", str(zoo), f"--base_image={BASE}", f"--local_pkg_dir={tmp_path / 'dist'}")
    assert code == 0, said
    code, said = command("build", str(zoo), "--image=zoo:1", "--engine_flags=--layers=false")
    assert code == 0, said
    assert "The image is only on this machine." in said

    look = tmp_path / "look"
    look.write_text(
        "FROM zoo:1\n"
        "RUN id -u; id -g; cd /model_zoo && find . | sort; "
        "cd flowers; python -c 'import iris; print(iris.words.WORDS, iris.words.__file__)'; "
        "python -m elasticcb --version\n"
    )
    said = engine.run("build", "--layers=false", f"--file={look}", str(tmp_path / "dist"))
    lines = said.splitlines()
    assert lines[lines.index("1000") :][:2] == ["1000", "1000"]
    files = [line for line in lines if line.startswith("./")]
    assert files == [
        "./flowers", "./flowers/iris.py", "./requirements.txt", "./wheels", "./wheels/words-1.0-py3-none-any.whl",
    ]  # fmt: skip
    assert re.search(r"^of a local wheel /opt/zoo/lib/python\S+/words.py$", said, re.MULTILINE)
    assert f"elasticcb, version {elasticcb.__version__}" in lines


def test_build_that_fails_shows_what_the_engine_said_last_and_what_to_do(command, zoo):
    (zoo / "Dockerfile").write_text("FROM scratch\nCOPY flowers /flowers\nCOPY words.txt /\n")
    code, said = command("build", str(zoo), "--image=zoo:1")
    assert code == 1
    live, _, error = said.partition("Error: ")
    assert "COPY flowers /flowers" in live
    assert "The image zoo:1 was not built" in error
    assert "words.txt" in error
    assert "A file that the Dockerfile copies is not in" in error


def test_machine_without_any_engine_is_told_what_to_install(zoo, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(zoo))
    assert main(["zoo", "init", str(zoo)]) == 0
    assert main(["zoo", "build", str(zoo), "--image=zoo:1"]) == 2
    said = capfd.readouterr().err
    assert all(f"  {name}: it is not installed\n" in said for name in NAMES)
    assert "Install one of docker, podman, buildah" in said
