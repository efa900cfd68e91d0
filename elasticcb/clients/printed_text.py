"""Text that hooks print on a worker, until it is sent to the master. Pure."""

from __future__ import annotations

from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb

_MAX_CHARACTERS = 1 << 20  # that wait


class PrintedText:
    """Whole lines, in order; more than a limit is left out."""

    def __init__(self) -> None:
        self._pieces: list[tuple[bool, str]] = []  # of standard error or output, in order
        self._size = 0
        self._left_out = 0  # lines

    def __bool__(self) -> bool:
        return bool(self._pieces or self._left_out)

    def add(self, text: str, is_error: bool) -> None:
        """Text was printed."""
        if self._size + len(text) > _MAX_CHARACTERS:
            self._left_out += text.count("\n")
        elif text:
            self._pieces.append((is_error, text))
            self._size += len(text)

    def take(self, all_text: bool) -> list[pb.PrintedText]:
        """The lines to send now.

        Args:
            all_text: also lines that have not ended.
        """
        texts: list[tuple[bool, str]] = []
        begun = {False: "", True: ""}  # lines that have not ended
        for is_error, text in self._pieces:
            lines, end, rest = (begun[is_error] + text).rpartition("\n")
            begun[is_error] = rest.rpartition("\r")[2] if not rest.endswith("\r") else rest  # what a terminal shows
            if end:
                texts.append((is_error, lines + end))
        self._pieces = []
        for is_error, rest in begun.items():
            if rest and all_text:
                texts.append((is_error, f"{rest}\n"))
            elif rest:
                self._pieces.append((is_error, rest))
        if self._left_out:
            what = how_many(self._left_out, "more line")
            texts.append((False, f"({what} were printed, faster than they could be shown; see the worker's log)\n"))
        self._size, self._left_out = sum(len(text) for _, text in self._pieces), 0
        return [pb.PrintedText(text=text, is_error=is_error) for is_error, text in _joined(texts)]


def _joined(texts: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Neighbouring texts of the same stream as one; of a line that a program has overwritten (`\\r`), what is left."""
    joined: list[tuple[bool, list[str]]] = []
    for is_error, text in texts:
        lines = [f"{line.removesuffix(chr(13)).rpartition(chr(13))[2]}\n" for line in text.split("\n")[:-1]]
        if not joined or joined[-1][0] is not is_error:
            joined.append((is_error, []))
        joined[-1][1].extend(lines)
    return [(is_error, "".join(lines)) for is_error, lines in joined]
