"""Training options: from files and command lines and back, and what is said of wrong ones."""

import pytest

from autotp.errors import AutoTPError
from autotp.train.options import TrainOptions

NEEDED = dict(model="m", data="a.txt", out="o", tp=2)


def test_mappings_go_both_ways():
    given = {**NEEDED, "seq-length": 64, "grad_accum": 2, "lr": "1e-4", "betas": [0.9, 0.95], "warmup": 10, "clip": 0}
    options = TrainOptions.from_mapping({**given, "eval-data": ["b.jsonl", "c.txt"]})
    assert (options.seq_length, options.lr, options.betas, options.warmup) == (64, 1e-4, (0.9, 0.95), 10.0)
    assert options.data == ("a.txt",) and options.eval_data == ("b.jsonl", "c.txt") and options.steps is None
    assert TrainOptions.from_mapping(options.to_mapping()) == options


@pytest.mark.parametrize(
    "given, said",
    [
        ({"seq-lenght": 3}, "no option 'seq-lenght' .*3.*did you mean 'seq-length'"),
        ({"zzz": 3}, "no option 'zzz'.*--help"),
        ({"seq-length": 3, "seq_length": 4}, "twice, as 3 and 4"),
        ({"tp": "two"}, "--tp 'two' is a str, not a whole number"),
        ({"tp": True}, "--tp True is a bool"),
        ({"batch-size": 2.5}, "--batch-size 2.5 is a float, not a whole number"),
        ({"packing": "yes"}, "--packing 'yes' is a str, not true or false"),
        ({"lr": "fast"}, "--lr 'fast' is a str, not a number"),
        ({"lr": -1}, "--lr -1.0 is not a finite number from 0 on"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"tp": 0}, "--tp 0 is below 1"),
        ({"steps": 0}, "--steps 0 is below 1"),
        ({"steps": 3, "epochs": 2}, "--steps 3 and --epochs 2"),
        ({"seq-length": 1}, "--seq-length 1 is below 2"),
        ({"warmup": 1.5}, "--warmup 1.5 is neither a share below 1 nor a whole number"),
        ({"dtype": "bfloat61"}, "--dtype bfloat61 is not one of .*did you mean 'bfloat16'"),
        ({"lr-schedule": "cosin"}, "did you mean 'cosine'"),
        ({"betas": [0.9]}, "--betas .* two numbers"),
        ({"betas": [0.9, 1.0]}, "--betas"),
        ({"eps": 0}, "--eps 0.0 is not above 0"),
        ({"eval-every": 5}, "--eval-every 5 needs something to evaluate on"),
        ({"data": []}, "names no file"),
        ({"text-field": ""}, "--text-field"),
        ({"model": 3}, "MODEL 3 is a int, not a text"),
    ],
)
def test_wrong_values_are_named(given, said):
    with pytest.raises(AutoTPError, match=said):
        TrainOptions.from_mapping({**NEEDED, **given})


def test_what_is_missing_is_named():
    with pytest.raises(AutoTPError, match="MODEL, --out must be given"):
        TrainOptions.from_mapping({"data": "a", "tp": 1})
