"""The console command: its arguments are read, one command is run, and what goes wrong is said in one message."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Sequence

from ..errors import AutoTPError
from .parser import build_parser
from .ranks import SpokenFor, is_other_rank, say_error, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns its exit code.

    0: done; 1: the plan splits nothing, or the parallelized model computes something else; 2: an error, in one message;
    130: interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    with contextlib.redirect_stderr(io.StringIO()) if is_other_rank() else contextlib.nullcontext():
        args = build_parser().parse_args(argv)
    args.argv = argv
    try:
        return args.run(args)
    except SpokenFor:
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
