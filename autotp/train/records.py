"""Training files as records, one after another, from any place in the file: text, JSONL, parquet and arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AutoTPError
from .paths import nearest_path

PIECE = 1 << 16  # bytes of a text file that are made tokens at once
ROWS = 256  # of a parquet file that are decoded at once
PACKED = (".gz", ".zip", ".zst", ".bz2", ".xz", ".tar")


@dataclass(frozen=True)
class Record:
    """A text, a piece of one, or a chat.

    Attributes:
        text: None for a chat.
        messages: of a chat: dicts with `role` and `content`.
        begins, ends: whether a document begins and ends here; False inside a long text.
        offset: where the next record begins: bytes of a text or JSONL file, rows of a table.
        where: file and place, for messages.
    """

    text: str | None
    messages: list[dict[str, Any]] | None
    begins: bool
    ends: bool
    offset: int
    where: str


def check_files(paths: tuple[str, ...], flag: str) -> None:
    """Refuse what can be known to be no training data without reading it.

    Raises:
        AutoTPError: a path that is missing, a directory, compressed, `.json`, empty or not to be read; a package that is needed
            and missing.
    """
    for path in map(Path, paths):
        if path.is_dir():
            raise AutoTPError(f"{flag} {path} is a directory: name the files in it, such as {path / '*.jsonl'}")
        if not path.is_file():
            raise AutoTPError(f"{flag} {path}: there is no such file.{nearest_path(path) or ' Check the path.'}")
        if path.suffix in PACKED:
            raise AutoTPError(f"{flag} {path} is compressed: unpack it first")
        if path.suffix == ".json":
            raise AutoTPError(f"{flag} {path}: a .json file is read whole; write one object a line and name it .jsonl")
        if path.suffix in (".parquet", ".arrow"):
            _pyarrow(path)
        try:
            with open(path, "rb") as file:
                first = file.read(1)
        except OSError as error:
            raise AutoTPError(f"{flag} {path} can't be read: {error.strerror or error}") from error
        if not first:
            raise AutoTPError(f"{flag} {path} is empty: there is nothing in it to learn from")


def iterate_records(path: str, offset: int = 0, text_field: str = "text") -> Iterator[Record]:
    """The records of a file from `offset` on, which is 0 or some record's `offset`.

    Raises:
        AutoTPError: not UTF-8, no JSON, no table, or a record with neither a text nor messages; with the place.
    """
    suffix = Path(path).suffix
    try:
        if suffix == ".jsonl":
            yield from _read_jsonl(path, offset, text_field)
        elif suffix == ".parquet":
            yield from _read_rows(path, _parquet_batches(path, offset), offset, text_field)
        elif suffix == ".arrow":
            yield from _read_rows(path, _arrow_batches(path, offset), offset, text_field)
        else:
            yield from _read_text(path, offset)
    except OSError as error:
        raise AutoTPError(f"can't read {path}: {error}") from error


def _read_text(path: str, offset: int) -> Iterator[Record]:
    """A text file is one document; its pieces end before a line that begins with no space, where no token ends late."""
    with open(path, "rb") as file:
        file.seek(offset)
        piece, begins = [file.readline()], offset == 0
        size = len(piece[0])
        while piece[0]:
            line = file.readline()
            if line and (size < PIECE or line[:1].isspace()):
                piece.append(line)
                size += len(line)
                continue
            text = _decode(b"".join(piece), path, f"byte {offset}")
            offset += size
            yield Record(text, None, begins, not line, offset, f"{path} before byte {offset}")
            piece, size, begins = [line], len(line), False


def _read_jsonl(path: str, offset: int, text_field: str) -> Iterator[Record]:
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            where = f"{path}, the line at byte {offset}"
            offset += len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(_decode(line, path, where))
            except json.JSONDecodeError as error:
                raise AutoTPError(f"{where} is not JSON ({error}): write one object a line") from error
            yield _make_record(value, text_field, offset, where)


def _read_rows(path: str, batches: Iterator[Any], offset: int, text_field: str) -> Iterator[Record]:
    for batch in batches:
        wanted = [name for name in (text_field, "messages") if name in batch.schema.names]
        if not wanted:
            raise AutoTPError(f"{path} has the columns {batch.schema.names}, none of which is {text_field!r} or 'messages': "
                              f"name the text's with --text-field")  # fmt: skip
        for value in batch.select(wanted).to_pylist():
            offset += 1
            yield _make_record(value, text_field, offset, f"{path}, row {offset - 1}")


def _make_record(value: Any, text_field: str, offset: int, where: str) -> Record:
    """A record of a JSON object or a table's row: its `messages`, or else its text."""
    if not isinstance(value, dict):
        raise AutoTPError(f"{where} is a {type(value).__name__}, not an object with {text_field!r} or 'messages'")
    messages, text = value.get("messages"), value.get(text_field)
    if messages is not None and text is not None:
        raise AutoTPError(f"{where} has both {text_field!r} and 'messages': leave one of them out")
    if isinstance(messages, list) and messages and all(isinstance(each, dict) and "role" in each for each in messages):
        kept = [{key: item for key, item in each.items() if item is not None} for each in messages]
        return Record(None, kept, True, True, offset, where)
    if messages is not None:
        raise AutoTPError(f"{where}: 'messages' is not a list of objects with 'role' and 'content'")
    if not isinstance(text, str):
        has = f"is a {type(text).__name__}" if text_field in value else f"is missing; there are {sorted(value)}"
        raise AutoTPError(f"{where}: the text {text_field!r} {has}: name another key with --text-field, or give 'messages'")
    return Record(text, None, True, True, offset, where)


def _decode(data: bytes, path: str, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AutoTPError(f"{path} is not UTF-8 text ({error}, after {where}): convert it first") from error


# -- tables -------------------------------------------------------------------------------------------------------------


def _pyarrow(path: str | Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise AutoTPError(f"{path} needs pyarrow to be read: pip install pyarrow, or give JSONL") from error
    return pyarrow


def _parquet_batches(path: str, offset: int) -> Iterator[Any]:
    """Record batches from row `offset` on; row groups before it are not read."""
    pyarrow = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            first = 0
            while first < len(sizes) and offset >= sizes[first]:
                offset -= sizes[first]
                first += 1
            groups = list(range(first, len(sizes)))
            yield from _skip_rows(file.iter_batches(ROWS, row_groups=groups) if groups else iter(()), offset)
    except pyarrow.ArrowException as error:
        raise AutoTPError(f"{path} is not a parquet file that can be read: {error}") from error


def _arrow_batches(path: str, offset: int) -> Iterator[Any]:
    """The same of an arrow file, either of its two forms: with an index, or a stream, as `datasets` writes."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.memory_map(path) as file:
            indexed = file.read(6) == b"ARROW1"
            file.seek(0)
            if indexed:
                reader = pyarrow.ipc.open_file(file)
                yield from _skip_rows((reader.get_batch(i) for i in range(reader.num_record_batches)), offset)
            else:
                yield from _skip_rows(iter(pyarrow.ipc.open_stream(file)), offset)
    except pyarrow.ArrowException as error:
        raise AutoTPError(f"{path} is not an arrow file that can be read: {error}") from error


def _skip_rows(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for batch in batches:
        skipped = min(count, batch.num_rows)
        count -= skipped
        if skipped < batch.num_rows:
            yield batch.slice(skipped)
