"""The flags that the user gave, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticcb.cli.config import ConfigFile
from elasticcb.storage.remote_files import is_url


@dataclass(frozen=True)
class GivenFlags:
    """The flags of one run.

    Args:
        values: values of all flags of the command, defaults included.
        explicit: names of flags given on the command line or in the config file, with a readable value.
        from_config: names of flags that come from the config file.
        config: the file, if any.
        unreadable: messages about values of the wrong type; `values` has the defaults for them.
        working_directory: base of relative paths on the command line.
    """

    values: dict[str, Any]
    explicit: frozenset[str]
    from_config: frozenset[str] = frozenset()
    config: ConfigFile | None = None
    unreadable: tuple[str, ...] = ()
    working_directory: Path = field(default_factory=Path.cwd)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.explicit

    def flag(self, name: str, with_value: bool = False) -> str:
        """A flag as messages name it: "--num_ps=0 (in /home/me/job.yaml)"."""
        value = self.values.get(name)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        text = f"--{name}={shown}" if with_value else f"--{name}"
        if name in self.from_config and self.config is not None:
            text += f" (in {self.config.path})"
        return text

    def base(self, name: str) -> Path:
        """The base of a relative path given for `name`."""
        if name in self.from_config and self.config is not None:
            return self.config.folder
        return self.working_directory

    def path(self, name: str) -> Path | None:
        """The absolute path given for `name`; None if none was given. Links are not followed."""
        value = self.values.get(name)
        return absolute(self.base(name), value) if value else None

    def folder(self, name: str) -> str:
        """The folder given for `name`: its absolute path or its URL; "" if none was given."""
        value = self.values.get(name) or ""
        return value if is_url(value) else str(self.path(name) or "")


def absolute(base: Path, text: str) -> Path:
    """`text` as an absolute path, with `~` expanded and `..` resolved."""
    from os.path import abspath

    return Path(abspath(base / Path(text).expanduser()))
