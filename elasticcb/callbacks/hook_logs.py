"""`logs` of hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class HookLogs(dict[str, Any]):
    """What Keras passes to a hook. More values are available by key, but loops over `logs` do not see them.

    Example:

        logs = HookLogs({"loss": 0.5}, version=12)
        assert logs["version"] == 12 and list(logs) == ["loss"]
    """

    def __init__(self, logs: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **more: Any) -> None:
        super().__init__(logs)
        self._more = more

    def __missing__(self, name: str) -> Any:
        return self._more[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._more

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._more.get(name, default))

    def copy(self) -> HookLogs:
        return HookLogs(self, **self._more)
