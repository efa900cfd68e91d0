"""Ctrl-C at a chosen moment of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(operation: int, call: Callable[[], None]) -> bool:
    """Calls, with Ctrl-C before one of the operations of it; whether it has as many."""
    left = operation

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return trace

    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    assert left > 0, "it was lost"
    return False
