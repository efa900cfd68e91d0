"""Builds `elasticcb/proto/*_pb2*.py` from `proto/` whenever the package is built or installed."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTO = "elasticcb.proto"


def generate(package_root: Path) -> None:
    """Compiles the messages into `package_root/elasticcb/proto`."""
    import grpc_tools
    from grpc_tools import protoc

    # protoc derives the generated module's import path from the file's path below the include
    # folder, so the folder `proto` is mapped onto the package `elasticcb/proto`.
    includes = [f"-Ielasticcb/proto={ROOT / 'proto'}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={package_root}" for kind in ("python", "pyi")]
    (package_root / "elasticcb" / "proto").mkdir(parents=True, exist_ok=True)
    status = protoc.main(["protoc", *includes, *outputs, f"elasticcb/proto/{PROTO}"])
    if status:
        raise SystemExit(f"protoc failed on proto/{PROTO} with status {status}")


class BuildWithProto(build_py):
    def run(self) -> None:
        generate(ROOT if self.editable_mode else Path(self.build_lib))
        super().run()


setup(cmdclass={"build_py": BuildWithProto})
