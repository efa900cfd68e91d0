"""What `ps` and /proc show of a process: its command and its environment, as if it had been started with them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_SET_MM, _SET_MM_MAP = 35, 14  # linux/prctl.h
# start_code, end_code, start_data, end_data, start_brk, brk, start_stack, arg_start, arg_end, env_start, env_end,
# auxv, auxv_size, exe_fd: `struct prctl_mm_map`
_MAP = struct.Struct("=12QIi")
_CODE, _DATA, _BRK, _STACK = (26, 27), (45, 46), (47,), (28,)  # fields of /proc/PID/stat, from 1

_shown: list[ctypes.Array[ctypes.c_char]] = []  # the kernel reads them as long as the process lives


def show_process_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Makes others see `command` and `environment`; where the kernel does not let it, nothing changes."""
    texts = [_zero_terminated(command), _zero_terminated(f"{name}={value}" for name, value in environment.items())]
    buffers = [ctypes.create_string_buffer(text, len(text)) for text in texts]
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        library = ctypes.CDLL(None)
        library.sbrk.restype, library.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
        code, data, brk, stack = ([int(fields[i - 3]) for i in where] for where in (_CODE, _DATA, _BRK, _STACK))
        ends = [end for buffer in buffers for end in (ctypes.addressof(buffer), ctypes.addressof(buffer) + len(buffer))]
        layout = _MAP.pack(*code, *data, *brk, library.sbrk(0), *stack, *ends, 0, 0, -1)
        size, zero = ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)
        if library.prctl(_SET_MM, ctypes.c_ulong(_SET_MM_MAP), ctypes.c_char_p(layout), size, zero) == 0:
            _shown[:] = buffers
    except (OSError, AttributeError, IndexError, ValueError, struct.error):
        return


def _zero_terminated(texts: Iterable[str]) -> bytes:
    return b"".join(text.encode(errors="surrogateescape") + b"\0" for text in texts)
