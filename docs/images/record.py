"""Records a real job that loses a worker: the animated picture of README.md.

    pip install --target build/pyte "pyte>=0.8,<0.9"
    PYTHONPATH=build/pyte .venv/bin/python docs/images/record.py docs/images/lost-worker.svg

Runs `elasticcb train` in a pseudo-terminal, kills a worker, and draws what the terminal showed, in real time but for
the start. The SVG needs no script: CSS shows one picture after another. Rows that repeat are stored once.
"""

import contextlib
import fcntl
import html
import os
import pty
import shutil
import struct
import sys
import termios
import time
from pathlib import Path

import psutil
import pyte

ARGUMENTS = "train --config model_zoo/digits/job.yaml --num_epochs=20 --output=digits"
FOLDER = Path("/tmp/demo")  # where it runs: a path that is short enough for the lines of the summary
STARTED, START_SECONDS = "Model:", 1.5  # what the terminal shows by then; how long the command alone is shown
KILL_AFTER, KILLED = "Epoch  7/", "worker-1"  # what the terminal shows by then; the process
COLUMNS, ROWS, CELL, LINE, MARGIN = 100, 28, 8.43, 18, 14  # the last three in pixels, of a font of 14
WIDTH, HEIGHT = round(2 * MARGIN + COLUMNS * CELL), 3 * MARGIN + (ROWS + 1) * LINE
PICTURE_SECONDS, END_SECONDS = 0.2, 8.0  # how long a picture stays at least, and the last one
COLOURS = {"default": "#d6deeb", "cyan": "#4dd0e1", "brown": "#ffcb6b"}  # brown: what pyte calls yellow
DIM, BOLD = "#8592a6", ' font-weight="bold"'
FRAME = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">
<rect width="100%%" height="100%%" rx="8" fill="#10141c"/>
<rect y="{HEIGHT - LINE - MARGIN * 1.5:g}" width="100%%" height="{LINE + MARGIN}" fill="#1b2230"/><style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
@keyframes film{{%s}}#film{{animation:film %.1fs steps(1,end) infinite}}
@media(prefers-reduced-motion){{#film{{animation:none;transform:translateX(%dpx)}}}}</style>
<defs>%s</defs>
<g id="film">%s</g></svg>
"""


def row_of(screen: pyte.Screen, at: int) -> str:
    """One row as SVG: a text element for each run of characters that look alike."""
    runs: list[tuple[int, str, tuple[str, bool]]] = []
    for column in range(COLUMNS):
        cell = screen.buffer[at][column]
        look = (DIM if cell.blink else COLOURS[cell.fg], cell.bold)
        if runs and runs[-1][2] == look:
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, look)
        else:
            runs.append((column, cell.data, look))
    return "".join(text_element(column, text, *look) for column, text, look in runs if text.strip())


def text_element(column: int, text: str, colour: str, bold: bool = False) -> str:
    """Text that is as wide as its columns in every font."""
    column, text = column + len(text) - len(text.lstrip()), text.strip()
    place = f'x="{MARGIN + column * CELL:.1f}" textLength="{len(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text {place} fill="{colour}"{BOLD * bold}>{html.escape(text, quote=False)}</text>'


def record(command: list[str]) -> list[tuple[float, list[str]]]:
    """Runs the command and kills the worker; answers pictures: seconds, and rows, that of the other terminal last."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ elasticcb {ARGUMENTS}\r\n".encode())
    child, terminal = pty.fork()
    if not child:
        os.chdir(FOLDER)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.execve(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    begun, other = 0.0, ""
    pictures = [(0.0, [row_of(screen, at) for at in range(ROWS)])]
    with contextlib.suppress(OSError):  # what Linux says at the end
        while data := os.read(terminal, 65536):
            stream.feed(data.replace(b"\x1b[2m", b"\x1b[5m"))  # pyte knows no dim text; nothing here blinks
            shown = "\n".join(screen.display)
            if not begun and STARTED not in shown:
                continue
            begun = begun or time.monotonic() - START_SECONDS
            if not other and KILL_AFTER in shown:
                worker = next(p for p in psutil.Process(child).children(recursive=True) if p.name() == KILLED)
                worker.kill()
                other = text_element(0, f"$ kill -9 {worker.pid}   # {KILLED}, from another terminal", COLOURS["brown"])
            seconds = time.monotonic() - begun
            if len(pictures) > 1 and seconds - pictures[-2][0] < PICTURE_SECONDS:
                pictures.pop()
            pictures.append((seconds, [*(row_of(screen, at) for at in range(ROWS)), other]))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("\n".join(screen.display))
    return pictures


def drawn(pictures: list[tuple[float, list[str]]]) -> str:
    """The pictures as one SVG, side by side: each moves into sight at its time."""
    total = pictures[-1][0] + END_SECONDS
    names = {row: f"r{at}" for at, row in enumerate(dict.fromkeys(row for _, rows in pictures for row in rows))}
    tops = [MARGIN + (line + 0.75) * LINE + MARGIN * (line == ROWS) for line in range(ROWS + 1)]
    defs = "\n".join(f'<g id="{name}">{row}</g>' for row, name in names.items())
    film, steps = "", ""
    for at, (seconds, rows) in enumerate(pictures):
        uses = (f'<use href="#{names[row]}" y="{top:g}"/>' for row, top in zip(rows, tops, strict=False) if row)
        film += f'<g transform="translate({at * WIDTH})">{"".join(uses)}</g>\n'
        steps += f"{100 * seconds / total:.3f}%{{transform:translateX({-at * WIDTH}px)}}"
    return FRAME % (steps, total, WIDTH * (1 - len(pictures)), defs, film)


if __name__ == "__main__":
    shutil.copytree("model_zoo/digits", FOLDER / "model_zoo/digits")
    command = [str(Path(sys.executable).absolute().with_name("elasticcb")), *ARGUMENTS.split()]
    Path(sys.argv[1]).write_text(drawn(record(command)))
    shutil.rmtree(FOLDER)
