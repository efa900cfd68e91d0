"""What the user gave: values, and where each one came from."""

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
        values: of every flag of the command, the default where it was not given.
        explicit: names given on the command line or in the config file.
        from_config: those of them that come from the config file.
        config: the file, if any.
        unreadable: what is wrong with values that are not of their flag's type; `values` has the defaults for them.
        working_directory: what relative paths on the command line are relative to.
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
        """How to speak of a flag in a message: "--num_ps=0 (in /home/me/job.yaml)"."""
        value = self.values.get(name)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        text = f"--{name}={shown}" if with_value else f"--{name}"
        if name in self.from_config and self.config is not None:
            text += f" (in {self.config.path})"
        return text

    def base(self, name: str) -> Path:
        """What a relative path given for `name` is relative to."""
        if name in self.from_config and self.config is not None:
            return self.config.folder
        return self.working_directory

    def path(self, name: str) -> Path | None:
        """The absolute path given for `name`; None when none was given. Links are not followed."""
        value = self.values.get(name)
        return absolute(self.base(name), value) if value else None

    def folder(self, name: str) -> str:
        """The folder given for `name`: its absolute path, or its URL; "" when none was given."""
        value = self.values.get(name) or ""
        return value if is_url(value) else str(self.path(name) or "")


def absolute(base: Path, text: str) -> Path:
    """`text` as an absolute path, `~` expanded and `..` taken out."""
    from os.path import abspath

    return Path(abspath(base / Path(text).expanduser()))
