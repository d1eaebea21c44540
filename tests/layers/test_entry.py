"""The model's edge: sharded losses equal the model's own, logits keep what `logits=` promises, wrong use is named."""

import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from autotp.errors import AutoTPError, PlanError
from autotp.groups import resolve_group
from autotp.layers.base import insert_class, plain_class
from autotp.layers.batch import BatchCheck
from autotp.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from autotp.layers.entry import SHARDED_LOSS, ShardedLoss, check_logits_path, install_entry, remove_entry
from autotp.shard import Shard

FAMILIES = (  # noqa: SIM905
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 granite starcoder2 cohere smollm3 helium glm "
    "gpt_neox ernie4_5 arcee nemotron exaone4"
).split()
SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 33, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small_model(family="llama", **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | options)).train()


def shard_vocabulary(model, group, **options):
    """Embedding and head of `model` split over the vocabulary by hand, with its edge installed."""
    modules = {"embed": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    done = set()
    for name, layer in (("embed", VocabParallelEmbedding), ("lm_head", VocabParallelHead)):
        module = modules[name]
        insert_class(module, layer)
        full = (model.config.vocab_size, model.config.hidden_size)
        module.tp, module.full_name, module.shards = group, name, {"weight": Shard.even(full, 0, group.tp_size)}
        if module.weight not in done:
            done.add(module.weight)
            module.weight.data = module.shards["weight"].split(module.weight.data, group.tp_rank).clone()
    install_entry(model, group, "lm_head", options.pop("loss", SHARDED_LOSS), **options)
    return model


def make_batch(seed=0):
    ids = torch.randint(3, 33, (2, 7), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_path_proves_on_meta(family):
    with torch.device("meta"):
        model = small_model(family)
    before = dict(model.__dict__), dict(model._modules)
    assert check_logits_path(model) is None
    assert (dict(model.__dict__), dict(model._modules)) == before


def test_logits_path_reasons():
    model = small_model()
    cls = type(model)

    class Mixing(cls):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids).last_hidden_state
            logits = self.lm_head(hidden).log_softmax(-1)
            return {"loss": self.loss_function(logits, labels, self.config.vocab_size), "logits": logits}

    class Raising(cls):
        def forward(self, input_ids, labels=None, **kwargs):
            raise KeyError("no such thing")

    class Apart(cls):
        def forward(self, input_ids, labels=None, **kwargs):
            return self.model(input_ids).last_hidden_state @ self.lm_head.weight.T

    class Lossless(cls):
        def forward(self, input_ids, labels=None, **kwargs):
            return self.lm_head(self.model(input_ids).last_hidden_state)

    found = {}
    for changed in (Mixing, Raising, Apart, Lossless):
        model.__class__ = changed
        found[changed.__name__] = check_logits_path(model)
    assert "mixes the columns" in found["Mixing"] or "are not those" in found["Mixing"]
    assert "KeyError" in found["Raising"] and "can't be run alone" in found["Apart"]
    assert "loss_function 0 times" in found["Lossless"]
    model.__class__ = cls
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    assert "not ForCausalLMLoss" in check_logits_path(model)
    assert check_logits_path(torch.nn.Linear(2, 2)) is not None


def compare_models(pg, family, tied):
    group = resolve_group(pg)
    plain = small_model(family, tie_word_embeddings=tied)
    local = shard_vocabulary(copy.deepcopy(plain), group)
    batch = make_batch()
    ids, labels = batch["input_ids"], batch["labels"]
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    for more in (
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": torch.tensor(5)},
        {"labels": labels, "num_items_in_batch": 5},
        {"labels": ids, "shift_labels": shifted},
        {"labels": ids, "ignore_index": int(ids[0, 1])},
    ):
        plain.zero_grad()
        local.zero_grad()
        wanted, got = plain(ids, **more), local(ids, **more)
        wanted.loss.backward()
        got.loss.backward()
        torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=1e-6)
        assert got.logits is None and "logits" not in got
        for (name, full), part in zip(plain.named_parameters(), local.parameters(), strict=True):
            grad = full.grad
            if part.shape != full.shape:
                grad = Shard.even(full.shape, 0, group.tp_size).split(grad, group.tp_rank)
            torch.testing.assert_close(part.grad, grad, rtol=5e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    return True


@pytest.mark.parametrize(
    ("family", "tied", "size"), [("llama", True, 2), ("gemma2", True, 2), ("cohere", False, 2), ("granite", False, 3)]
)
def test_loss_and_gradients_equal_the_models_own(ranks, family, tied, size):
    assert all(ranks.run(compare_models, family, tied, size=size))


def check_logits_modes(pg):
    group = resolve_group(pg)
    plain = small_model()
    batch = make_batch()
    wanted = plain(**batch)
    parts = {mode: shard_vocabulary(copy.deepcopy(plain), group, logits=mode) for mode in ("auto", "full", "sharded")}
    columns = Shard.even((33, 1), 0, 2).cuts[0].indices(group.tp_rank)
    out = {mode: model(**batch) for mode, model in parts.items()}
    assert out["auto"].logits is None
    torch.testing.assert_close(out["full"].logits, wanted.logits)
    torch.testing.assert_close(out["full"]["logits"], wanted.logits)
    torch.testing.assert_close(out["sharded"].logits, wanted.logits[..., columns])
    for mode, result in out.items():
        torch.testing.assert_close(result.loss, wanted.loss, rtol=1e-6, atol=1e-6)
        model = parts[mode]
        loss, logits = model(**batch, return_dict=False)[:2]
        torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=1e-6)
        assert (logits is None) == (mode == "auto")
        assert model(batch["input_ids"]).logits.shape[-1] == (len(columns) if mode == "sharded" else 33)
        model.eval()
        result = model(**batch)
        torch.testing.assert_close(result.logits, plain(**batch).logits)
        torch.testing.assert_close(result.loss, wanted.loss, rtol=1e-6, atol=1e-6)
        tokens = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens, plain.eval().generate(batch["input_ids"], max_new_tokens=4, do_sample=False))
        plain.train()
    # labels at their place, and a whole-logits loss behind the gradient of the logits themselves
    full = parts["full"].train()
    full(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"]).logits.sum().backward()
    plain(**batch).logits.sum().backward()
    grad = Shard.even((33, 16), 0, 2).split(plain.lm_head.weight.grad, group.tp_rank)
    torch.testing.assert_close(full.lm_head.weight.grad, grad, rtol=5e-5, atol=1e-5)
    with pytest.raises(PlanError, match="'some' is not one of"):
        install_entry(full, group, "lm_head", SHARDED_LOSS, logits="some")


def test_logits_modes(ranks):
    ranks.run(check_logits_modes)


def check_label_smoothing(pg):
    group = resolve_group(pg)
    plain, batch = small_model(), make_batch()
    local = shard_vocabulary(copy.deepcopy(plain), group)
    logits, labels = plain(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(local(**batch, label_smoothing=0.1).loss, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(local.eval()(**batch, label_smoothing=0.1).loss, wanted, rtol=1e-6, atol=1e-6)


def test_label_smoothing(ranks):
    ranks.run(check_label_smoothing)


def check_other_losses(pg):
    group = resolve_group(pg)
    batch = make_batch()
    plain = small_model()
    wanted = plain(**batch)
    # gathers, because the path was not proved
    gathered = shard_vocabulary(copy.deepcopy(plain), group, loss="the head gathers")
    torch.testing.assert_close(gathered(**batch).logits, wanted.logits)
    assert "_loss_function" not in gathered.__dict__
    # gathers, because the caller set a loss of their own later
    local = shard_vocabulary(copy.deepcopy(plain), group)
    local.loss_function = sum_logits
    torch.testing.assert_close(local(**batch).loss, wanted.logits.sum(), rtol=1e-5, atol=1e-4)
    remove_entry(local)
    assert local.loss_function is sum_logits
    # a forward that doesn't pass through __call__, as peft calls it
    local = shard_vocabulary(copy.deepcopy(plain), group)
    torch.testing.assert_close(local.forward(**batch).logits, wanted.logits)
    # an exception inside leaves nothing behind
    with pytest.raises(TypeError), warnings.catch_warnings():
        local(**batch, num_items_in_batch="many")
    assert not local.lm_head.keep_sharded
    torch.testing.assert_close(local(batch["input_ids"]).logits, wanted.logits)


def sum_logits(logits, labels, vocab_size, **kwargs):
    assert logits.shape[-1] == vocab_size
    return logits.sum()


def test_other_losses_get_whole_logits(ranks):
    ranks.run(check_other_losses)


def check_copies(pg):
    group = resolve_group(pg)
    batch = make_batch()
    first = shard_vocabulary(small_model(), group)
    second = copy.deepcopy(first)
    mine, other = first.__dict__["autotp_entry"], second.__dict__["autotp_entry"]
    assert mine is not other and other.loss is second.loss_function and other.loss.state is other and other.group is mine.group
    torch.testing.assert_close(first(**batch).loss, second(**batch).loss)
    remove_entry(second)
    assert second.loss_function is ForCausalLMLoss and not second._forward_pre_hooks and not second._forward_hooks
    torch.testing.assert_close(second(**batch).loss, first(**batch).loss)  # the head gathers now
    assert isinstance(first.loss_function, ShardedLoss) and first(**batch).logits is None
    second.loss_function = sum_logits
    install_entry(second, group, "lm_head", "the head gathers")
    remove_entry(second)
    remove_entry(second)
    assert second.loss_function is sum_logits
    assert plain_class(first.lm_head) is torch.nn.Linear
    first.__dict__["broken"] = "a rank died"
    with pytest.raises(AutoTPError, match="a rank died"):
        first(**batch)


def test_copies_and_removal(ranks):
    ranks.run(check_copies)


def check_batches(pg):
    group = resolve_group(pg)
    model = shard_vocabulary(small_model(), group)
    batch = make_batch()
    last = group.tp_size - 1
    changed = {name: value.clone() for name, value in batch.items()}
    if group.tp_rank == last:
        changed["labels"][1, 3] += 1
    with pytest.raises(AutoTPError, match=rf"values of TP rank\(s\) \[{last}\] are not those of rank 0"):
        model(**changed)
    mine = batch["input_ids"][:, : 7 - (group.tp_rank == last)]
    with pytest.raises(AutoTPError, match=rf"shapes or dtypes of TP rank\(s\) \[{last}\]"):
        model(mine)
    model(**batch).loss.backward()
    model(inputs_embeds=torch.ones(2, 3, 16, dtype=torch.float32))
    with pytest.raises(AutoTPError, match="values"):
        model(inputs_embeds=torch.full((2, 3, 16), 1 + 1e-6 * (group.tp_rank == last)))
    with torch.no_grad():  # a decoding step is not checked
        model(torch.full((2, 1), 3))
        model(torch.full((2, 1), 3 + (group.tp_rank == last)))
    quiet = shard_vocabulary(small_model(), group, check_batch=False)
    quiet(**changed)


def test_a_capture_waits_for_no_comparison(monkeypatch):
    """What is pending is judged by the first forward after it."""
    check, judged = BatchCheck(None), []
    check.stream, check.pending = object(), ("hashes", "done")  # as after a forward on a GPU
    monkeypatch.setattr(check, "judge", lambda: judged.append(check.pending))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        check.start((), make_batch())
    assert judged == [] and check.pending == ("hashes", "done")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check.start((), {})
    assert judged == [("hashes", "done")]


@pytest.mark.parametrize("size", [2, 3])
def test_a_batch_that_differs_is_named(ranks, size):
    ranks.run(check_batches, size=size)


def wrap_with_fsdp(pg):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    group = resolve_group(pg)
    model = shard_vocabulary(small_model(vocab_size=32, tie_word_embeddings=False), group)
    mesh = DeviceMesh.from_group(pg, "cpu")
    guarded = FSDPParamGroup.__init__  # where guards are installed they refuse the wrap itself: here, the edge must notice
    FSDPParamGroup.__init__ = getattr(guarded, "__wrapped__", guarded)
    try:
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
    finally:
        FSDPParamGroup.__init__ = guarded
    for _ in range(2):
        with pytest.raises(AutoTPError, match=r"FSDP shards .*ranks \[0, 1\]"):
            model(**make_batch())


def test_fsdp_over_the_tp_group_is_refused(ranks):
    ranks.run(wrap_with_fsdp)
