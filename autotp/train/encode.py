"""Records as tokens and labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import AutoTPError
from .records import Record

IGNORED = -100  # the label of a token that does not count in the loss


class Encoder:
    """Makes tokens of records.

    A document begins with the tokenizer's own first token (BOS), if it has one, and ends with its end token. A chat is what
    the tokenizer's template makes of it, with nothing added.

    Args:
        tokenizer: a transformers tokenizer.
        completions_only: only what the assistant says in a chat gets labels.

    Raises:
        AutoTPError: a tokenizer without an end token.
    """

    def __init__(self, tokenizer: Any, completions_only: bool = False) -> None:
        self.tokenizer, self.completions_only = tokenizer, completions_only
        self.eos = tokenizer.eos_token_id
        if self.eos is None:
            raise AutoTPError("the tokenizer has no end token to put between texts: set its eos_token and save it")
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos
        probe = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        self.start = [bos] if bos is not None and probe[:1] == [bos] else []

    def encode(self, record: Record) -> np.ndarray:
        """Tokens and labels, `[2, tokens]` int32; none for an empty text."""
        if record.messages is not None:
            return self._encode_chat(record.messages, record.where)
        if self.completions_only:
            raise AutoTPError(f"{record.where} is a text, not a chat: --completions-only needs records with 'messages'")
        assert record.text is not None
        if record.begins and record.ends and not record.text:
            return np.empty((2, 0), dtype=np.int32)
        ids = self._tokens(record.text)
        ids = (self.start if record.begins else []) + ids + ([self.eos] if record.ends else [])
        return np.array([ids, ids], dtype=np.int32)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    # -- chats --------------------------------------------------------------------------------------------------------

    def _encode_chat(self, messages: list[dict[str, Any]], where: str) -> np.ndarray:
        text = self._render(messages, where)
        if not self.completions_only:
            ids = self._tokens(text)
            return np.array([ids, ids], dtype=np.int32)
        if not self.tokenizer.is_fast:
            raise AutoTPError(f"--completions-only needs a fast tokenizer, which {type(self.tokenizer).__name__} is not")
        found = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        ids = np.array(found["input_ids"], dtype=np.int32)
        starts, ends = np.array(found["offset_mapping"]).reshape(-1, 2).T
        labels = np.full_like(ids, IGNORED)
        for begin, end in self._answers(messages, text, where):
            inside = (ends > begin) & (ends <= end) & (ends > starts)  # a token over the beginning is for the model to say
            labels[inside] = ids[inside]
        return np.stack([ids, labels])

    def _answers(self, messages: list[dict[str, Any]], text: str, where: str) -> list[tuple[int, int]]:
        """Where in `text` the assistant speaks: after the prompt for its answer, up to the next message."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], where, prompt=True)
            answered = self._render(messages[: index + 1], where)
            if not text.startswith(answered) or not answered.startswith(prompt):
                raise AutoTPError(
                    f"{where}: the template writes message {index} otherwise when others follow it, so what the assistant says "
                    f"can't be told apart. Give chats that end with their first answer, or leave --completions-only out."
                )
            spans.append((len(prompt), len(answered)))
        return spans

    def _render(self, messages: list[dict[str, Any]], where: str, prompt: bool = False) -> str:
        if not self.tokenizer.chat_template:
            raise AutoTPError(
                f"{where} is a chat, and the tokenizer has no chat template: use the instruct model's, or give texts"
            )
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template raises what it likes
            raise AutoTPError(f"{where}: the chat template refuses it: {type(error).__name__}: {error}") from error
