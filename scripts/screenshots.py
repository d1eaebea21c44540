"""Draws the README's terminals, docs/plan.svg and docs/train.svg, from real runs in a pseudo-terminal.

pip install rich, then: python scripts/screenshots.py MODEL_DIRECTORY
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import pydoc_data.topics
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLUMNS = 80
NAME = "SmolLM2-135M-Instruct"
PLAN = ["plan", NAME, "--tp", "2"]
TRAIN = ["train", NAME, "--tp", "2", "--data", "python.txt", "--out", "out"]
TRAIN += ["--steps", "40", "--seq-length", "128", "--dtype", "float32"]


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / NAME).symlink_to(Path(sys.argv[1]).resolve())
        topics = pydoc_data.topics.topics
        (Path(place) / "python.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)))
        DOCS.mkdir(exist_ok=True)
        draw("plan", [(PLAN, run_in_terminal(PLAN, place))])
        # Ctrl-C in the middle, so that the picture shows a run and how it goes on.
        draw("train", [(TRAIN, run_in_terminal(TRAIN, place, press_after=rb" 14/40 "))])
    return 0


def run_in_terminal(args: list[str], place: str, press_after: bytes | None = None) -> str:
    """What `autotp args` wrote to a terminal of `COLUMNS`; Ctrl-C is pressed once `press_after` has been seen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm-256color"}

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "autotp.cli", *args],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=place, env=env, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            new = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        seen += new
        if press_after is not None and re.search(press_after, seen):
            os.write(ours, b"\x03")
            press_after = None
    print(f"{args[0]} ended with {process.wait()}", file=sys.stderr)
    return seen.decode()


def draw(name: str, runs: list[tuple[list[str], str]]) -> None:
    """`docs/name.svg` of the commands and what stood on the terminal at their ends."""
    shown = [f"\x1b[1m$ autotp {' '.join(args)}\x1b[0m\n{last_state(text)}" for args, text in runs]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(shown).rstrip()))
    svg = console.export_svg(title=f"autotp {name}")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)  # fonts from elsewhere
    (DOCS / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


def last_state(text: str) -> str:
    """The lines as they stood at the end: what was drawn over is gone."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        parts = [part for part in line.replace("\x1b[K", "").split("\r") if part.strip()]
        lines.append(parts[-1].rstrip() if parts else "")
    return "\n".join(line for line in lines if line.strip() or line == "").replace("\x1b[A", "")


if __name__ == "__main__":
    sys.exit(main())
