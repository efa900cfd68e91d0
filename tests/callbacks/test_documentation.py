from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest

from elasticcb import callbacks as package

DOCS = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_the_documentation_runs(example: str) -> None:
    names: dict = {}
    exec(compile(example, "docs/callbacks.md", "exec"), names)
    built = names["callbacks"]()
    assert built
    assert all(isinstance(callback, keras.callbacks.Callback) for callback in built)


def test_every_callback_of_the_package_is_documented_and_importable() -> None:
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) and issubclass(value, keras.callbacks.Callback):
            assert f"`{name}`" in DOCS, name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing
