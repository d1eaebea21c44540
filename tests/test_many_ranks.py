"""Four and eight ranks: the unsharded model's numbers, tokens and files, also where there are more ranks than kv heads."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from shrink import tiny_model

import autotp
from tests.models import batch, compare_slices, tiny
from tests.ranks import grid

# 8 heads each; 4 kv heads, but for gpt2 and bert. A hybrid: linear attention and attention in turn, and experts.
KINDS = {"gpt2": "causal", "qwen3_next": "causal", "bert": "masked"}
CASES = [
    ("llama", 4, True),
    ("llama", 8, False),
    ("llama", 8, True),
    ("mixtral", 8, True),
    ("gpt2", 4, False),
    ("qwen3_next", 8, False),
    ("bert", 8, False),
]
NEW = 6


def make(family):
    return tiny_model(family, KINDS[family]) if family in KINDS else tiny(family)


def make_calls(model):
    """Two batches; the rows of the second are fewer than two on each of 8 ranks, and the last ranks have none."""
    return [batch(model, 0, 2, 12), batch(model, 1, 1, 9)]


def generate(model, ids):
    options = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def train(model, calls, steps=2):
    """Two steps of SGD, each of the loss over all batches; the gradients of the last stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        for call in calls:
            model(**call).loss.backward()
        optimizer.step()


def run_whole(family, folder):
    """What the unsharded model gives, for all ranks to read."""
    model = make(family)
    calls = make_calls(model)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "start")
    with torch.no_grad():
        found = {f"logits {i}": model(**call).logits for i, call in enumerate(calls)}
    if model.can_generate() and family != "bert":
        found["tokens"] = generate(model, calls[0]["input_ids"])
    save_file(found, folder / "found")
    train(model, calls, 1)
    save_file({name: p.grad for name, p in model.named_parameters()}, folder / "gradients")
    train(model, calls)
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "stepped")


def compare_with_whole(group, family, folder, dealt):
    model = autotp.parallelize(make(family), group, sequence_parallel=dealt)
    calls, found, start = make_calls(model), load_file(folder / "found"), load_file(folder / "start")
    whole = autotp.full_state_dict(model)
    assert bool(whole) == (dist.get_rank(group) == 0)
    assert not whole or all(torch.equal(whole[name], value) for name, value in start.items())
    with torch.no_grad():
        for i, call in enumerate(calls):
            expected = found[f"logits {i}"]
            assert (model(**call).logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    if "tokens" in found:
        assert torch.equal(generate(model, calls[0]["input_ids"]), found["tokens"])
    train(model, calls, 1)
    compare_slices(model, folder / "gradients", 1e-3)
    train(model, calls)
    compare_slices(model, folder / "stepped", 1e-4, lambda parameter: parameter.detach())
    autotp.load_full_state_dict(model, start if whole else None)
    model.save_pretrained(folder / "saved")


@pytest.mark.parametrize("family, size, dealt", CASES)
def test_the_unsharded_models_numbers(eight_ranks, tmp_path, family, size, dealt):
    run_whole(family, tmp_path)
    eight_ranks.run(compare_with_whole, family, tmp_path, dealt, size=size)
    saved, start = load_file(tmp_path / "saved" / "model.safetensors"), load_file(tmp_path / "start")
    assert all(torch.equal(saved[name], start[name]) for name in start)


def train_two_copies(group, folder):
    mesh = grid(4)
    model = autotp.parallelize(tiny("llama"), mesh["tp"]).train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    inputs = batch(model, rows=4)
    mine = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in inputs.items()}
    train(wrapped, [mine])
    compare_slices(model, folder / "gradients", 1e-3)
    compare_slices(model, folder / "stepped", 1e-4, lambda parameter: parameter.detach())


def test_two_copies_on_four_ranks_each(eight_ranks, tmp_path):
    model = tiny("llama").train()
    train(model, [batch(model, rows=4)])
    save_file({name: p.grad for name, p in model.named_parameters()}, tmp_path / "gradients")
    save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "stepped")
    eight_ranks.run(train_two_copies, tmp_path, size=8)
