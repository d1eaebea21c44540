"""More ranks than kv heads: each rank has the one its query heads read, computes it and caches no other."""

import copy

import pytest
import torch
import torch.distributed as dist
from measures import compare

import autotp
from autotp.shard import deal_units
from tests.models import batch, tiny

HEAD, NEW = 8, 12
SIZES = {  # query heads, kv heads, ranks: query heads and kv head of each rank
    "Qwen2-0.5B's heads": ("qwen2", 14, 2, 4),
    "28 over 4 kv heads": ("qwen2", 28, 4, 8),
    "packed": ("phi3", 14, 2, 4),
}


def generate(model, ids, **options):
    """Greedy tokens, and the keys and values that every layer has cached, `[B, kv heads, S, head]`."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits), [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def check_heads(group, family, heads, kv):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    reference = tiny(family, num_attention_heads=heads, num_key_value_heads=kv, hidden_size=heads * HEAD)
    model = autotp.parallelize(copy.deepcopy(reference), group)
    row = compare(reference, model, [batch(reference)])
    assert row["verdict"] == "pass", row

    together = size // kv  # ranks that hold one kv head
    counts = [count for _ in range(kv) for count in deal_units(heads // kv, together)]
    for layer in model.model.layers:
        assert layer.self_attn.o_proj.weight.shape[1] == counts[rank] * HEAD
    own = rank // together
    ids = batch(reference)["input_ids"]
    for options in ({}, {"cache_implementation": "static"}):
        tokens, logits, cache = generate(model, ids, **options)
        expected_tokens, expected_logits, expected_cache = generate(reference, ids, **options)
        assert torch.equal(tokens, expected_tokens), options
        assert (logits - expected_logits).abs().max() < 1e-4, options
        for mine, whole in zip(cache, expected_cache, strict=True):
            for got, full in zip(mine, whole, strict=True):
                torch.testing.assert_close(got, full[:, own : own + 1], rtol=1e-4, atol=1e-5)
    return counts[rank]


@pytest.mark.parametrize("case", list(SIZES))
def test_kv_heads_are_copied_and_cached_once_a_rank(request, case):
    family, heads, kv, size = SIZES[case]
    pool = request.getfixturevalue("eight_ranks" if size > 4 else "ranks")
    assert sum(pool.run(check_heads, family, heads, kv, size=size)) == heads
