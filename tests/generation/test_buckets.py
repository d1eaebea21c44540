"""Sizes of static memory: few, and never too small."""

from autotp.generation.buckets import (
    PASS_TOKENS,
    WHOLE_ROW_TOKENS,
    list_prompts,
    round_length,
    round_prompt,
    round_rows,
    split_prompt,
)


def test_sizes_hold_what_they_are_for_and_waste_less_than_half():
    for tokens in range(1, 9000, 7):
        assert tokens <= round_length(tokens) and (round_length(tokens) < 2 * tokens or round_length(tokens) == 256)
    assert [round_length(n) for n in (1, 256, 257, 1024, 1025, 1279, 1537, 3073)] == [256, 256, 512, 1024, 1536, 1536, 2048, 4096]
    assert [round_rows(n) for n in (1, 2, 3, 9, 64)] == [1, 2, 4, 16, 64]
    assert len({round_length(n) for n in range(1, 32769)}) == 13


def test_sizes_are_their_own():
    assert all(round_length(round_length(n)) == round_length(n) for n in range(1, 5000, 13))


def test_prompts_for_graphs_are_few_and_fit():
    assert list_prompts(1, 1536) == [64, 128, 192, 256, 384, 512, 768, 1024, 1536] and list_prompts(8, 4096)[-1] == 512
    assert all(n <= round_prompt(n) < max(65, 1.51 * n) or n < 96 for n in range(1, 4097)) and list_prompts(64, 32) == []


def test_a_pass_of_the_prompt_is_bounded():
    assert split_prompt(1, 4096) == (1, None) and split_prompt(64, 1024) == (8, None) and split_prompt(3, 9000) == (1, None)
    assert split_prompt(5, WHOLE_ROW_TOKENS + 1) == (1, PASS_TOKENS)
