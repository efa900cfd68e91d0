"""Real engines for container images, with a store, a base image and a registry of their own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import elasticcb
from elasticcb.cli.image.engine import ENGINES

BASE = "localhost/base:1"
_CHECKOUT = str(Path(elasticcb.__file__).parents[1])
USER, PASSWORD = "jo", "secret"
_HASH = "$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"  # of the password, by bcrypt
_REGISTRY_CONFIG = """\
version: 0.1
log: {{level: info}}
storage: {{filesystem: {{rootdirectory: {folder}/images}}}}
http: {{addr: "127.0.0.1:0"}}
auth: {{htpasswd: {{realm: images, path: {folder}/htpasswd}}}}
"""


@dataclass(frozen=True)
class TestEngine:
    """An engine's command, and the environment in which it keeps images and logins in a folder of the test."""

    __test__ = False

    name: str
    folder: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.name, *arguments],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def make_base_image(self) -> None:
        """Makes `BASE`: a virtual environment of this Python, the folders of which builds see; skips the test where
        nothing can run in a build."""
        if self.name == "docker":
            pytest.skip("builds of docker don't see the Python of this machine")
        _make_root(self.folder / "root")
        file = self.folder / "base"
        file.write_text("FROM scratch\nCOPY . /\nENV PATH=/opt/zoo/bin:/usr/bin:/bin\nRUN python -V\n")
        try:
            self.run("build", "--layers=false", f"--tag={BASE}", f"--file={file}", str(self.folder / "root"))
        except AssertionError as error:
            pytest.skip(f"{self.name} runs nothing here: {str(error).strip().splitlines()[-1]}")

    def log_in(self, address: str) -> None:
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (self.folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": login}}}))


def make_engine(name: str, folder: Path, address: str) -> TestEngine:
    """An engine that takes the registry at `address` without TLS; skips the test where it can't be used."""
    probe = next(engine.probe for engine in ENGINES if engine.name == name)
    if shutil.which(name) is None or subprocess.run([name, *probe], capture_output=True, check=False).returncode:
        pytest.skip(f"{name} is not there, or its daemon does not run")
    seen = {"/usr", sys.base_prefix, sys.prefix, _CHECKOUT}
    volumes = ", ".join(f'"{path}:{path}:ro"' for path in sorted(seen))
    (folder / "containers.conf").write_text(f"[containers]\nvolumes = [{volumes}]\n")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    (folder / "config.json").write_text("{}")
    return TestEngine(
        name,
        folder,
        {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{folder}/registries.conf",
            "REGISTRY_AUTH_FILE": f"{folder}/config.json",
            "DOCKER_CONFIG": str(folder),
        },
    )


def _make_root(root: Path) -> None:
    environment = root / "opt" / "zoo"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    lines = [_CHECKOUT, *(f"import site; site.addsitedir({path!r})" for path in site.getsitepackages())]
    packages.joinpath("this.pth").write_text("\n".join(lines))
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    (root / "tmp").mkdir()


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """The address of a registry that wants a login, on a port of its own; skips the test where there is none."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    (folder / "htpasswd").write_text(f"{USER}:{_HASH}\n")
    (folder / "config.yml").write_text(_REGISTRY_CONFIG.format(folder=folder))
    command = ["docker-registry", "serve", str(folder / "config.yml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(found[1] for line in process.stderr if (found := re.search(r"listening on ([\d.:]+)", line)))
        finally:
            process.terminate()
            process.stderr.read()


def write_wheel(folder: Path, name: str, module: str) -> Path:
    """A wheel of version 1.0 that holds one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path, information = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", module)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    return path
