"""What the tests of training runs share."""

import pytest

from tests.train.tiny import make_chats, make_texts, save_model, write_jsonl


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A directory with the model, its tokenizer, texts and chats."""
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    write_jsonl(directory / "texts.jsonl", [{"text": text} for text in make_texts(60)])
    write_jsonl(directory / "other.jsonl", [{"text": text} for text in make_texts(9, seed=9)])
    write_jsonl(directory / "chats.jsonl", make_chats())
    return directory
