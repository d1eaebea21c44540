"""Sizes that static memory comes in, so that few CUDA graphs serve every batch and length."""

from __future__ import annotations

SHORTEST = 256  # tokens of cache: below, attention costs nothing beside the weights
SHORTEST_PROMPT = 64
FINER = 1024  # from here on also the sizes half way between two powers of two
GRAPH_TOKENS = 4096  # rows x tokens of a prompt up to which launches, not computing, take the time: a graph saves them
PASS_TOKENS = 8192  # rows x tokens of a prompt that go through the model in one forward
WHOLE_ROW_TOKENS = 32768  # a row up to this long goes in one piece: pieces need a mask, which flash attention knows not


def round_rows(rows: int) -> int:
    """The batch size that `rows` sequences run in: the next power of two."""
    return 1 << (rows - 1).bit_length()


def round_length(tokens: int) -> int:
    """The cache length, in tokens, that `tokens` fit into."""
    return _round_up(max(tokens, SHORTEST), FINER)


def round_prompt(tokens: int) -> int:
    """The length, in tokens, that a prompt is padded to for a graph."""
    return _round_up(max(tokens, SHORTEST_PROMPT), 2 * SHORTEST_PROMPT)


def list_prompts(rows: int, length: int) -> list[int]:
    """Every length that prompts of `rows` rows are padded to, in a cache of `length` tokens."""
    found, tokens = [], 1
    while (size := round_prompt(tokens)) <= length and rows * size <= GRAPH_TOKENS:
        found.append(size)
        tokens = size + 1
    return found


def _round_up(tokens: int, finer: int) -> int:
    """The next power of two, or from `finer` on what lies half way before it."""
    power = 1 << (tokens - 1).bit_length()
    middle = power // 4 * 3
    return middle if middle >= finer and tokens <= middle else power


def split_prompt(rows: int, tokens: int) -> tuple[int, int | None]:
    """How a prompt `[rows, tokens]` goes through the model: rows a forward, and tokens a piece (None: each row in one piece).

    Rows are independent of one another, so fewer at a time cost nothing but launches and bound what activations take; a row
    is cut only where it alone is too long.
    """
    if tokens > WHOLE_ROW_TOKENS:
        return 1, PASS_TOKENS
    return max(1, min(rows, PASS_TOKENS // max(tokens, 1))), None
