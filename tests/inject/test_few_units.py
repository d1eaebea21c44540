"""More ranks than units: the plan says so with the numbers, for every Parameter that it is about, or is refused on request."""

import pytest

import autotp
from autotp import cli
from tests.models import tiny_config

MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
FEW = {  # family, what is small, the Parameters that are about it, and what the numbers are of
    "neurons": ("llama", dict(intermediate_size=2), MLP, "mlp.down_proj.weight"),
    "of layers planned by another": ("llama", dict(intermediate_size=2, num_hidden_layers=6), MLP, "mlp.down_proj.weight"),
    "experts": (
        "mixtral",
        dict(num_local_experts=2, intermediate_size=2),
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "mlp.experts.down_proj",
    ),
}


@pytest.mark.parametrize("case", list(FEW))
def test_the_numbers_are_in_the_plan(case):
    family, small, names, row = FEW[case]
    config = tiny_config(family, **small)
    plan = autotp.make_plan(config, 3)
    numbers = f"too few units: 2 unit(s) of model.layers.*.{row} < 3 ranks"
    reasons = {entry.name: entry.reason for entry in plan.whole}
    about = [f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in names]
    assert plan.proof == "proved" and all(reasons[name] == numbers for name in about)
    assert str(plan).count(numbers) == len(names)  # one line for layers alike
    with pytest.raises(autotp.PlanError) as refused:  # of a plan made before, too
        autotp.make_plan(config, 3, plan=autotp.Plan.from_json(plan.to_json()), few_units="refuse")
    assert str(refused.value).count(numbers) == 1 and "few_units='whole'" in str(refused.value)


def test_what_is_gathered_for_it_says_so():
    """Heads in pairs that share a norm: fewer units than ranks, but columns enough to be gathered."""
    config = tiny_config("diffllama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    plan = autotp.make_plan(config, 4)
    for name in "qo":  # keys and values are one pair, which none of the two units has to itself
        module = plan[f"model.layers.0.self_attn.{name}_proj"]
        assert module.style == "colwise_gather_output"
        assert module.why == "no region takes it: too few units: 2 unit(s) of model.layers.*.self_attn.o_proj.weight < 4 ranks"
    with pytest.raises(autotp.PlanError, match=r"2 unit\(s\) .* < 4 ranks"):
        autotp.make_plan(config, 4, few_units="refuse")


def test_more_ranks_than_heads_hold_copies_and_say_on_how_many():
    """Queries and keys are copied, values are dealt inside a head: nothing is left whole, so nothing is refused."""
    config = tiny_config("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    plan = autotp.make_plan(config, 4, few_units="refuse")
    assert plan["model.layers.0.self_attn.o_proj"].shards["weight"].local_shape(0) == (64, 4)
    assert str(plan).count("copies of weight on up to 2 ranks") == 2  # q_proj and k_proj
    with pytest.raises(autotp.PlanError, match="few_units='no'"):
        autotp.make_plan(config, 4, few_units="no")


def test_the_command_has_the_choice(tmp_path, capsys):
    tiny_config("llama", intermediate_size=2).save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--tp", "3"]) == 0
    assert "2 unit(s)" in capsys.readouterr().out
    assert cli.main(["plan", str(tmp_path), "--tp", "3", "--few-units", "refuse"]) == 2
    assert "2 unit(s)" in capsys.readouterr().err
