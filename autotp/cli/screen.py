"""What is drawn on a terminal and nowhere else: colours, widths, running seconds, and the bar of a training run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from tqdm import tqdm

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def paint(text: str, colour: str, stream: TextIO) -> str:
    """`text` in a colour, if `stream` is a terminal and `NO_COLOR` is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` is; None if it is none, where lines may be as long as they are."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def paint_plan(text: str, stream: TextIO) -> str:
    """A printed plan, with its heads bold, its rules dim and the verdict of the proof green or yellow."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if re.fullmatch("-+", line):
            lines[number] = paint(line, "dim", stream)
            lines[number - 1] = paint(lines[number - 1], "bold", stream)
        elif line.startswith("proof: "):
            lines[number] = "proof: " + paint(line[7:], "green" if line == "proof: proved" else "yellow", stream)
    lines[0] = paint(lines[0], "bold", stream)
    return "\n".join(lines)


@contextmanager
def show_progress(doing: str, after_s: float = 2.0, every_s: float = 1.0) -> Iterator[None]:
    """What takes longer than `after_s` counts its seconds in a line on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        start = time.monotonic()
        if done.wait(after_s):
            return
        while True:
            print(f"\r{doing}: {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
            if done.wait(every_s):
                break
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()


def describe_step(event: dict[str, Any]) -> str:
    """A step's loss, speed, share of the GPU's peak and memory, of those that are known."""
    said = [f"loss {event['loss']:.4f}"]
    if event.get("tokens_per_s") is not None:
        said.append(f"{event['tokens_per_s']:,.0f} tok/s")
    if event.get("mfu") is not None:
        said.append(f"MFU {event['mfu']:.0%}")
    if event.get("memory_gib") is not None:
        said.append(f"{event['memory_gib']:.1f} GiB")
    return "  ".join(said)


class TrainBar:
    """The progress of a training run: a bar on a terminal, about twenty lines elsewhere, and one for each evaluation."""

    LINES = 20

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._bar: tqdm | None = None
        self._said = 0
        self._waiting = ExitStack()

    def wait(self, doing: str) -> None:
        """Count seconds until the first step."""
        self._waiting.enter_context(show_progress(doing))

    def show(self, event: dict[str, Any]) -> None:
        """One step's event, as `train` gives it."""
        self._waiting.close()
        step, steps = event["step"], event.get("steps") or 0
        if self.stream.isatty():
            self._draw(event, step, steps)
        elif not self._said or step == steps or step - self._said >= max(1, steps // self.LINES):
            self._said = step
            print(f"step {step}/{steps or '?'}  {describe_step(event)}  lr {event['lr']:.2e}", file=self.stream, flush=True)
        if event.get("eval_loss") is not None:
            self.say(f"step {step}: evaluation loss {event['eval_loss']:.4f}")

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, file=self.stream, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _draw(self, event: dict[str, Any], step: int, steps: int) -> None:
        if self._bar is None:
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}  {remaining} left"
            self._bar = tqdm(total=steps or None, initial=step - 1, file=self.stream, bar_format=layout, dynamic_ncols=True)
        self._bar.set_description_str(describe_step(event), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        self._waiting.close()
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None
