"""Text that hooks print on a worker, until it is sent to the master. Pure."""

from __future__ import annotations

import itertools
import operator

from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb

_MAX_CHARACTERS = 1 << 20  # that wait


class PrintedText:
    """Whole lines, in order, as a terminal shows them; more than a limit is left out."""

    def __init__(self) -> None:
        self._lines: list[tuple[bool, str]] = []  # of standard error or output
        self._begun = {False: "", True: ""}  # lines that have not ended, by stream
        self._size = 0
        self._left_out = 0  # lines

    def __bool__(self) -> bool:
        return bool(self._lines or self._left_out or any(self._begun.values()))

    def add(self, text: str, is_error: bool) -> None:
        """Text was printed."""
        *lines, begun = (self._begun[is_error] + text).split("\n")
        self._begun[is_error] = _shown(begun)
        for line in (_shown(each).removesuffix("\r") for each in lines):
            if self._size + len(line) > _MAX_CHARACTERS:
                self._left_out += 1
            else:
                self._lines.append((is_error, f"{line}\n"))
                self._size += len(line) + 1

    def take(self, all_text: bool) -> list[pb.PrintedText]:
        """The lines to send now.

        Args:
            all_text: also lines that have not ended.
        """
        for is_error, begun in self._begun.items():
            if begun and (all_text or len(begun) > _MAX_CHARACTERS):
                self.add("\n", is_error)
        if self._left_out:
            what = how_many(self._left_out, "more line")
            text = f"({what} were printed, faster than they could be shown; see the worker's log)\n"
            self._lines.append((False, text))
        parts = itertools.groupby(self._lines, operator.itemgetter(0))
        texts = [pb.PrintedText(text="".join(line for _, line in part), is_error=stream) for stream, part in parts]
        self._lines, self._size, self._left_out = [], 0, 0
        return texts


def _shown(line: str) -> str:
    """What is left of a line that a program has overwritten from its beginning."""
    return line[line.rfind("\r", 0, len(line) - 1) + 1 :]
