"""Cases of scripts/bench_scale.py, the lines that tell of them, and their table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = "SCALE "  # what begins a line of results on a terminal
KEY = ("implementation", "shape", "tp", "dp", "work")
TITLES = ("implementation", "TP x DP", "ms", "speed-up", "efficiency", "exposed ms", "peak GiB")


class Case:
    """One torchrun, and what is left of its works."""

    def __init__(self, implementation: str, shape: str, tp: int, dp: int, works: list[str]) -> None:
        self.implementation, self.shape, self.tp, self.dp, self.works = implementation, shape, tp, dp, works

    def key(self, work: str) -> dict[str, Any]:
        """What a line of this case begins with."""
        return dict(implementation=self.implementation, shape=self.shape, tp=self.tp, dp=self.dp, work=work)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"{self.implementation}, {self.shape}, TP={self.tp} x DP={self.dp}"


class Results:
    """The lines of a file.

    Args:
        about: the machine, commit and sizes, without which lines are not of this table.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.lines = [line for line in lines if line.get("about") == about]

    def add(self, line: dict[str, Any]) -> None:
        line = {**line, "about": self.about}
        self.lines.append(line)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(MARK + json.dumps({key: value for key, value in line.items() if key != "about"}), flush=True)

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The newest good line of a case's work."""
        found = [line for line in self.lines if "error" not in line and all(line.get(name) == key[name] for name in key)]
        return found[-1] if found else None


def print_table(cases: list[Case], results: Results) -> None:
    """Each shape's works: implementations at all their sizes; and the checks of numbers."""
    for shape, work in dict.fromkeys((case.shape, work) for case in cases for work in case.works):
        rows = [(case, results.find(**case.key(work))) for case in cases if case.shape == shape and work in case.works]
        alone = [line["ms"] / line["tokens"] for case, line in rows if line and case.ranks == 1]
        print(f"\n{shape}, {work}\n| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
        for case, line in rows:
            cells = ["not run"] if line is None else list_cells(line, min(alone, default=None), case.ranks)
            cells += [""] * (len(TITLES) - 2 - len(cells))
            print(f"| {case.implementation} | {case.tp} x {case.dp} | {' | '.join(cells)} |")
    for line in results.lines:
        if line["work"] == "check":
            errors = f"logits {line['logits']:.1e}, gradients {line['gradients']:.1e}"
            print(f"{name_line(line)}: {'good' if line['good'] else 'WRONG'}, {errors}")


def list_cells(line: dict[str, Any], alone: float | None, ranks: int) -> list[str]:
    """One row's numbers; `alone`: milliseconds a token on one GPU, if known."""
    faster = None if alone is None else alone * line["tokens"] / line["ms"]
    ratios = ["", ""] if faster is None else [f"{faster:.2f}", f"{faster / ranks:.2f}"]
    return [str(line["ms"]), *ratios, *("" if line.get(name) is None else str(line[name]) for name in ("exposed_ms", "peak_gib"))]


def name_line(line: dict[str, Any]) -> str:
    """What a line is about."""
    return f"{line['implementation']}, {line['shape']}, TP={line['tp']} x DP={line['dp']}, {line['work']}"


def find_failed(results: Results) -> list[dict[str, Any]]:
    """Lines of what went wrong and was not run again since."""
    return [line for line in results.lines if "error" in line and not results.find(**{name: line[name] for name in KEY})]
