"""Inspects a `.keras` or `.weights.h5` file without a model."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticcb.errors import CheckpointError

Shape = tuple[int, ...]

_INSIDE = "model.weights.h5"  # member of a .keras file, which is a zip
# Paths of an optimizer's step count; the outer one belongs to a wrapper such as LossScaleOptimizer.
_ITERATIONS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")


def verify_file(path: Path) -> None:
    """Raises `CheckpointError` if the file is incomplete."""
    try:
        if path.name.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
                if damaged or _INSIDE not in archive.namelist():
                    raise CheckpointError(f"The file is damaged: {damaged or 'it contains no weights'}.")
        with _opened(path):
            pass
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"The file is incomplete: {error}.") from error


def saved_iterations(path: Path) -> int | None:
    """The number of steps of the optimizer in the file; None if there is no optimizer."""
    with _opened(path) as file:
        for name in _ITERATIONS:
            found = file.get(name)
            if getattr(found, "shape", None) == () and found.dtype.kind in "iu":
                return int(found[()])
    return None


def saved_variables(path: Path) -> dict[str, Shape]:
    """Shapes of the model's variables by their path in the file, without optimizer variables."""
    shapes: dict[str, Shape] = {}

    def note(name: str, item: Any) -> None:
        if hasattr(item, "shape") and not any("optimizer" in part for part in name.split("/")):
            shapes[name] = tuple(item.shape)

    with _opened(path) as file:
        file.visititems(note)
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import h5py

    if path.name.endswith(".keras"):
        with zipfile.ZipFile(path) as archive, archive.open(_INSIDE) as inner, h5py.File(inner, "r") as file:
            yield file
    else:
        with h5py.File(path, "r") as file:
            yield file
