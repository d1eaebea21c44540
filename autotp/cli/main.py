"""The console command: its arguments are read, one command is run, and what goes wrong is said in one message."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from ..errors import AutoTPError
from .parser import build_parser
from .screen import paint


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns its exit code.

    0: done; 1: the plan splits nothing, or the parallelized model computes something else; 2: an error, in one message;
    130: interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except SpokenFor:  # another rank says it
        return 2
    except (AutoTPError, OSError) as error:
        say_error(error)
        return 2
    except KeyboardInterrupt:
        print("autotp: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # nobody who runs a command is helped by a traceback on the screen
        say_error(error, write_trace(traceback.format_exc()))
        return 2


class SpokenFor(Exception):
    """An error of which another rank tells the user."""


def say_error(error: BaseException, trace: str = "") -> None:
    """One line on stderr, and a second one that names the file with the full trace, if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    known = isinstance(error, AutoTPError | OSError)
    said = " ".join(lines) if known else f"{type(error).__name__}: {' '.join(lines)}"
    print(f"{paint('autotp: error:', 'red', sys.stderr)} {said}", file=sys.stderr)
    if trace:
        print(f"autotp: full traces: {trace}", file=sys.stderr)


def write_trace(text: str) -> str:
    """`text` in a new file in the temporary directory; its path."""
    file, path = tempfile.mkstemp(prefix="autotp-", suffix=".log")
    with os.fdopen(file, "w") as stream:
        stream.write(text)
    return path
