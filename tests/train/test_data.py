"""Training data: each format gives the sequences made by hand, in an order that can be gone on with from any place."""

import io
import json
import sys

import numpy as np
import pytest
import torch

from autotp.errors import AutoTPError
from autotp.train import records
from autotp.train.batches import TrainBatches, collate, count_labels, count_tokens, eval_batches
from autotp.train.encode import IGNORED, Encoder
from autotp.train.records import check_files
from autotp.train.sequences import SequenceStream, ShuffledSequences
from tests.train.tiny import make_chats, make_texts, make_tokenizer, write_jsonl

TEXTS = [*make_texts(12), "", "end"]
LENGTH = 16
FORMATS = ("jsonl", "parquet", "arrow", "stream")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def write(directory, kind, rows, name="data"):
    """The rows in a file of that format, the tables in several groups or batches."""
    if kind == "jsonl":
        return write_jsonl(directory / f"{name}.jsonl", rows)
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    path = str(directory / f"{name}.{'parquet' if kind == 'parquet' else 'arrow'}")
    if kind == "parquet":
        from pyarrow.parquet import write_table

        write_table(table, path, row_group_size=3)
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def documents(tokenizer, texts=TEXTS):
    """By hand: each text's tokens and the end token."""
    return [[*tokens(tokenizer, text), tokenizer.eos_token_id] for text in texts if text]


def packed(docs, length=LENGTH):
    joined = [token for doc in docs for token in doc]
    return [joined[i : i + length] for i in range(0, len(joined) - length + 1, length)]


def padded(docs, length=LENGTH):
    return [part for doc in docs for i in range(0, len(doc), length) if len(part := doc[i : i + length]) > 1]


def as_lists(sequences):
    return [each[0].tolist() for each in sequences]


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_give_the_texts_of_a_column(tokenizer, tmp_path, kind):
    path = write(tmp_path, kind, [{"other": 1, "body": text} for text in TEXTS])
    for packing, by_hand in ((True, packed), (False, padded)):
        stream = SequenceStream((path, path), Encoder(tokenizer), LENGTH, packing, text_field="body")
        found = list(stream.one_pass())
        assert as_lists(found) == by_hand(documents(tokenizer) * 2) and len(found) > 10
        assert all((each[0] == each[1]).all() for each in found)
        assert stream.epoch == 1 and as_lists(stream.one_pass()) == as_lists(found)  # and again


def test_a_text_file_is_one_document(tokenizer, tmp_path, monkeypatch):
    lines = "\n".join(TEXTS[:6]) + "\n\n  indented\n" + "\n".join(TEXTS[6:])
    path = tmp_path / "words.txt"
    path.write_text(lines, encoding="utf-8")
    doc = [*tokens(tokenizer, lines), tokenizer.eos_token_id]
    for piece in (1 << 16, 40):
        monkeypatch.setattr(records, "PIECE", piece)
        for packing, by_hand in ((True, packed), (False, padded)):
            assert as_lists(SequenceStream((str(path),), Encoder(tokenizer), LENGTH, packing).one_pass()) == by_hand([doc])


def test_a_document_begins_as_the_tokenizer_begins_it(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    own = make_tokenizer()
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", own.bos_token_id)])
    path = write(tmp_path, "jsonl", [{"text": text} for text in TEXTS])
    docs = [[own.bos_token_id, *doc] for doc in documents(tokenizer)]
    assert as_lists(SequenceStream((path,), Encoder(own), LENGTH).one_pass()) == packed(docs)


@pytest.mark.parametrize("kind", FORMATS)
def test_chats_and_what_the_assistant_says(tokenizer, tmp_path, kind):
    chats = make_chats(6)
    path = write(tmp_path, kind, chats)
    texts = ["".join(f"<{m['role']}> {m['content']}\n" for m in chat["messages"]) for chat in chats]
    whole = list(SequenceStream((path,), Encoder(tokenizer), 400, packing=False).one_pass())
    assert as_lists(whole) == [tokens(tokenizer, text) for text in texts]
    assert all((each[0] == each[1]).all() for each in whole)
    answers = list(SequenceStream((path,), Encoder(tokenizer, completions_only=True), 400, packing=False).one_pass())
    assert as_lists(answers) == as_lists(whole)
    for chat, (ids, labels) in zip(chats, answers, strict=True):
        said = tokenizer.decode(ids[labels != IGNORED].tolist())
        assert said.split() == " ".join(m["content"] for m in chat["messages"] if m["role"] == "assistant").split()
        assert (labels[labels != IGNORED] == ids[labels != IGNORED]).all()


def test_sequences_without_a_label_are_left_out(tokenizer, tmp_path):
    chat = {"messages": [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "yes"}]}
    path = write(tmp_path, "jsonl", [chat])
    found = list(SequenceStream((path,), Encoder(tokenizer, completions_only=True), 8, packing=False).one_pass())
    assert found and all((each[1, 1:] != IGNORED).any() for each in found) and len(found) < 4


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", [*FORMATS, "text"])
def test_going_on_from_any_place_gives_the_same(tokenizer, tmp_path, kind, packing, monkeypatch):
    monkeypatch.setattr(records, "PIECE", 60)
    files = []
    for number in range(3):
        texts = make_texts(5, seed=number)
        if kind == "text":
            (tmp_path / f"{number}.txt").write_text("\n".join(texts), encoding="utf-8")
            files.append(str(tmp_path / f"{number}.txt"))
        else:
            files.append(write(tmp_path, kind, [{"text": text} for text in texts], str(number)))

    def fresh():
        stream = SequenceStream(tuple(files), Encoder(tokenizer), LENGTH, packing, seed=3)
        return ShuffledSequences(stream, seed=3, window=7)

    unbroken = fresh()
    all_of_it = as_lists(unbroken.take(90))  # several windows and epochs
    running = fresh()
    for place in range(0, 60, 3):
        kept = io.BytesIO()
        torch.save(running.state(), kept)
        kept.seek(0)
        again = fresh()
        again.load_state(torch.load(kept, weights_only=True))
        assert as_lists(again.take(30)) == all_of_it[place : place + 30]
        running.take(3)


def test_the_order_is_shuffled_by_the_seed_and_each_epoch_has_every_sequence(tokenizer, tmp_path):
    path = write(tmp_path, "jsonl", [{"text": text} for text in make_texts(30)])

    def draw(seed, count):
        return as_lists(ShuffledSequences(SequenceStream((path,), Encoder(tokenizer), LENGTH, seed=seed), seed).take(count))

    plain = as_lists(SequenceStream((path,), Encoder(tokenizer), LENGTH).one_pass())
    size = len(plain)
    two = draw(0, 2 * size)
    assert sorted(two[:size]) == sorted(two[size:]) == sorted(plain)
    assert two[:size] != two[size:] and two[:size] != plain and draw(1, size) != two[:size] and draw(0, size) == two[:size]
    assert SequenceStream((path,), Encoder(tokenizer), LENGTH).count() == size


def test_files_come_in_another_order_each_epoch(tokenizer, tmp_path):
    files = [write(tmp_path, "jsonl", [{"text": WORD * 30}], WORD) for WORD in ("fox ", "dog ", "cat ", "sun ")]
    stream = SequenceStream(tuple(files), Encoder(tokenizer), 8, packing=False, seed=0)
    epochs = [as_lists(stream.one_pass()) for _ in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len({str(epoch) for epoch in epochs}) > 1


def test_data_ranks_get_the_micro_batches_in_turn(tokenizer, tmp_path):
    path = write(tmp_path, "jsonl", [{"text": text} for text in make_texts(30)])

    def make(rank, ranks, accum):
        stream = SequenceStream((path,), Encoder(tokenizer), LENGTH, packing=False)
        return TrainBatches(ShuffledSequences(stream, 0), 2, accum, rank, ranks, 0, True)

    one, parts = make(0, 1, 4), [make(rank, 2, 2) for rank in range(2)]
    for _ in range(5):
        whole, halves = one.next_step(), [part.next_step() for part in parts]
        for micro, batch in enumerate(whole):
            theirs = halves[micro % 2][micro // 2]
            assert all(torch.equal(batch[key], theirs[key]) for key in batch)


def test_padding():
    sequences = [np.array([[5, 6, 7], [5, IGNORED, 7]], dtype=np.int32), np.array([[8], [8]], dtype=np.int32)]
    batch = collate(sequences, 9, True)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[5, IGNORED, 7], [8, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert count_labels(batch) == 1 and count_tokens(batch) == 4
    assert (
        set(collate(sequences[:1], 9, False)) == {"input_ids", "labels"} and count_tokens(collate(sequences[:1], 9, False)) == 3
    )


def test_evaluation_takes_each_sequence_once(tokenizer, tmp_path):
    path = write(tmp_path, "jsonl", [{"text": text} for text in TEXTS])

    def rows(rank, ranks, most=None):
        stream = SequenceStream((path,), Encoder(tokenizer), LENGTH, packing=False)
        found = eval_batches(stream, 4, rank, ranks, most, True)
        return [row[mask.bool()].tolist() for batch in found for row, mask in zip(batch["input_ids"], batch["attention_mask"])]  # noqa: B905

    expected = padded(documents(tokenizer))
    assert rows(0, 1) == expected and sorted(rows(0, 2) + rows(1, 2)) == sorted(expected)
    assert rows(0, 1, 2) == expected[:8] and len(rows(0, 2, 3) + rows(1, 2, 3)) == 12


# -- what users get wrong -------------------------------------------------------------------------------------------------


def read_all(tokenizer, path, completions_only=False):
    return list(SequenceStream((str(path),), Encoder(tokenizer, completions_only), LENGTH).one_pass())


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"text": "a"', "is not JSON"),
        ('["a"]', "is a list, not an object"),
        ('{"body": "a"}', "the text 'text' is missing; there are ['body']: name another key with --text-field"),
        ('{"text": 3}', "the text 'text' is a int"),
        ('{"text": "a", "messages": []}', "has both"),
        ('{"messages": ["a"]}', "not a list of objects"),
    ],
)
def test_a_bad_record_is_named_with_its_place(tokenizer, tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(AutoTPError) as info:
        read_all(tokenizer, path)
    assert said in str(info.value) and f"{path}, the line at byte 17" in str(info.value)


def test_bad_files_are_named(tokenizer, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1 is not enough")
    for name, said in (("latin.txt", "not UTF-8"), ("a.parquet", "not a parquet file"), ("a.arrow", "not an arrow file")):
        if name != "latin.txt":
            pytest.importorskip("pyarrow")
        with pytest.raises(AutoTPError, match=said):
            read_all(tokenizer, tmp_path / name)
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.txt.gz").write_text("")
    for name, said in (
        *(("a.json", "one object a line"), ("a.txt.gz", "unpack it"), ("", "is a directory")),
        ("latin.text", "there is no such file. Did you mean .*latin.txt"),
    ):
        with pytest.raises(AutoTPError, match=said):
            check_files((str(tmp_path / name),), "--data")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(AutoTPError, match="pip install pyarrow"):
        check_files((str(tmp_path / "a.parquet"),), "--data")


def test_other_columns_are_named(tokenizer, tmp_path):
    path = write(tmp_path, "parquet", [{"body": "a"}])
    with pytest.raises(AutoTPError, match=r"columns \['body'\], none of which is 'text' or 'messages'.*--text-field"):
        read_all(tokenizer, path)


def test_templates_that_cannot_be_used_are_named(tokenizer, tmp_path):
    path = write(tmp_path, "jsonl", make_chats(2))
    with pytest.raises(AutoTPError, match="--completions-only needs records with 'messages'"):
        read_all(tokenizer, write(tmp_path, "jsonl", [{"text": "a"}], "text"), completions_only=True)
    own = make_tokenizer()
    own.chat_template = None
    with pytest.raises(AutoTPError, match="no chat template"):
        read_all(own, path)
    own.chat_template = "{{ raise_exception('roles') }}"
    with pytest.raises(AutoTPError, match=r"refuses it.*roles"):
        read_all(own, path)
    own.chat_template = "{{ messages | length }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(AutoTPError, match="otherwise when others follow"):
        read_all(own, path, completions_only=True)
    own = make_tokenizer()
    own.eos_token = None
    with pytest.raises(AutoTPError, match="no end token"):
        Encoder(own)


def test_too_little_data_is_said(tokenizer, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps({"text": "fox"}) + "\n")
    for packing, said in ((True, "no whole sequence of 16 tokens"), (False, "no text of two tokens")):
        text = "fox" if packing else ""
        path.write_text(json.dumps({"text": text}) + "\n")
        stream = SequenceStream((str(path),), Encoder(tokenizer), LENGTH, packing)
        with pytest.raises(AutoTPError, match=said):
            ShuffledSequences(stream, 0).take(1)
