"""The options of a training run in a YAML file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import AutoTPError
from ..train.paths import nearest_path
from .checks import nearest


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-5` is a number, and a key that is given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.value[number][0].start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_config(path: str, names: Iterable[str]) -> dict[str, Any]:
    """The options in the file `path`, by their names with underscores.

    Args:
        names: of the options there are.

    Raises:
        AutoTPError: no such file, no YAML in it (with line and column), no mapping, or a key that is no option.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.load(text, _Loader)  # a SafeLoader: plain data only
    except OSError as error:
        raise AutoTPError(f"--config {path}: {error.strerror}.{nearest_path(path)}") from error
    except UnicodeDecodeError as error:
        raise AutoTPError(f"--config {path} is not UTF-8 text: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise AutoTPError(f"--config {path} is not YAML:{where} {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise AutoTPError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise AutoTPError(f"--config {path} must be lines of `option: value`, such as `tp: 2`")
    options, names = {}, list(names)
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in names:
            raise AutoTPError(f"--config {path}: there is no option {key}.{nearest(name, names)}")
        if name in options:
            raise AutoTPError(f"--config {path}: {name} is given twice")
        options[name] = value
    return options
