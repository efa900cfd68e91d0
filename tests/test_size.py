"""The size of the package: who lets it grow decides so, here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES, FILES = 66_557, 328  # at most; lower them when it becomes smaller


def test_package_does_not_grow_by_itself(capsys):
    files = [path for path in (ROOT / "elasticcb").rglob("*.py") if "_pb2" not in path.name]
    files = [path for path in files if "templates" not in path.parts]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    with capsys.disabled():
        print(f"the package: {lines:,} lines in {len(files)} files")
    assert lines <= LINES
    assert len(files) <= FILES
