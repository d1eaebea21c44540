"""What is to be done to a module once it is imported: libraries that a program never imports cost it no time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` after the module called `name` is imported: now, if it is; never, if it never is."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher(MetaPathFinder):
    """Finds nothing itself: lets `act` follow what the other finders' loader does."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((each for each in found if each is not None), None)
        # Some only ask whether it is there: the watch ends where it is run.
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module
            loader.exec_module = lambda module: self._follow(execute, module)
        return spec

    def _follow(self, execute: Callable[[Any], None], module: Any) -> None:
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.act()
