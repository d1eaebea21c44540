"""Adapters on quantised weights beside data parallelism, 2 x 2: DDP and FSDP2 train as the unsharded model on the whole batch."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import autotp
from autotp.errors import AutoTPError
from autotp.layers.packed import list_tensors
from tests.layers.test_adapters import add
from tests.layers.test_quantised import SIZES, make_config, need, packed_of, stand_for
from tests.models import batch, tiny
from tests.ranks import grid

peft = pytest.importorskip("peft")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny("llama", **SIZES).save_pretrained(path)
    return str(path)


def wrap_ddp(model, **options):
    return DistributedDataParallel(model, process_group=grid()["dp"].get_group(), **options)


def wrap_fully(model, ignore=False, **options):
    """FSDP2 on each layer, then on the rest."""
    if ignore:
        options["ignored_params"] = {p for p in model.parameters() if hasattr(p, "__tensor_flatten__")}
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=grid()["dp"], **options)
    return fully_shard(model, mesh=grid()["dp"], **options)


def read(path, kind, **options) -> Any:
    return autotp.from_pretrained(path, grid()["tp"], quantization_config=make_config(kind, **options))


def adapted(path, kind, **options) -> Any:
    """`(the quantised model over the TP ranks, one of its values on the whole batch)`, both with one adapter.

    LLM.int8() rounds what enters, too: the second is a copy of the first then, and unsharded elsewhere.
    """
    model = read(path, kind, **options)
    other = copy.deepcopy(model) if kind == "int8" else stand_for(model, AutoModelForCausalLM.from_pretrained(path))
    model, other = add(model), add(other)
    torch.manual_seed(5)
    state = {name: torch.randn_like(p) * 0.1 for name, p in add(tiny("llama", **SIZES)).named_parameters() if "lora_" in name}
    for each in (model, other):
        each.load_state_dict(state, strict=False)
    return model.train(), other.train()


def halves(inputs):
    return {name: value.chunk(2)[grid()["dp"].get_local_rank()] for name, value in inputs.items()}


def make_optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def step(model, wrapped, optimizer, inputs):
    """`(mean loss over the data ranks, norm of the whole gradient)` of one clipped step."""
    loss = wrapped(**inputs).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=grid()["dp"].get_group())
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [mean.item() / 2, float(norm)]


def train(model, wrapped, other, tolerance):
    optimizers = [make_optimizer(each) for each in (model, other)]
    for seed in range(3):
        inputs = batch(other.get_base_model(), seed=seed, rows=4)
        found = step(model, wrapped, optimizers[0], halves(inputs))
        assert found == pytest.approx(step(other, other, optimizers[1], inputs), rel=tolerance)
    return optimizers[0]


WRAPS = {
    "ddp": (wrap_ddp, {}),
    "fsdp2": (wrap_fully, {}),
    "fsdp2, not resharded": (wrap_fully, {"reshard_after_forward": False}),
    "fsdp2, products in half": (wrap_fully, {"mp_policy": HALF}),
    "fsdp2, theirs left whole": (wrap_fully, {"ignore": True}),
}
CASES = [
    *[(kind, "ddp", {}) for kind in ("int8", "torchao int8", "torchao int4")],
    ("nf4", "ddp", {"bnb_4bit_use_double_quant": True}),
    ("nf4", "fsdp2", {"bnb_4bit_use_double_quant": True}),
    ("nf4", "fsdp2, not resharded", {}),
    ("nf4", "fsdp2, products in half", {}),
    ("int8", "fsdp2", {}),
    ("torchao int8", "fsdp2, theirs left whole", {}),
]


def run_trains(group, path, kind, wrap, options, checkpointed):
    model, other = adapted(path, kind, **options)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    values = [each.unpack().clone() for each in packed_of(model).values()]
    function, settings = WRAPS[wrap]
    wrapped = function(model, **settings)
    train(model, wrapped, other, 3e-2 if settings.get("mp_policy") else 1e-4)
    if wrap == "ddp":
        for each, before in zip(packed_of(model).values(), values, strict=True):
            assert torch.equal(each.unpack(), before)
    dealt = [isinstance(each.weight, DTensor) for each in packed_of(model).values()]
    assert set(dealt) == {function is wrap_fully and "ignore" not in settings}


@pytest.mark.parametrize("kind, wrap, options", CASES, ids=[f"{kind}, {wrap}" for kind, wrap, _ in CASES])
def test_adapters_train_beside_data_parallelism(ranks, saved, kind, wrap, options):
    need(kind)
    ranks.run(run_trains, saved, kind, wrap, options, wrap == "fsdp2", size=4)


def run_shares(group, directory, kind, options):
    """Data ranks that hold other weights have those of the first after DDP, scales too."""
    base = tiny("llama", seed=grid()["dp"].get_local_rank(), **SIZES)
    model = autotp.quantize(autotp.parallelize(base, grid()["tp"]), make_config(kind, **options))
    model = add(model).train()
    wrapped = wrap_ddp(model)
    torch.testing.assert_close(
        *[each.float() for each in gather([m.unpack() for m in packed_of(model).values()])], rtol=0, atol=0
    )
    inputs = batch(base)
    with torch.no_grad():
        torch.testing.assert_close(*gather([wrapped(**inputs).loss]), rtol=0, atol=0)
    assert all(tensor.is_contiguous() for m in packed_of(model).values() for tensor in list_tensors(m.weight))


def gather(tensors):
    """Both data ranks' tensors, as one flat tensor each."""
    own = torch.cat([each.detach().flatten() for each in tensors])
    found = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(found, own, group=grid()["dp"].get_group())
    return found


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_copies_start_alike(ranks, tmp_path, kind):
    need(kind)
    ranks.run(run_shares, tmp_path, kind, {"bnb_4bit_use_double_quant": True} if kind == "nf4" else {}, size=4)


def run_saves(group, path, directory, wrap):
    """An adapter trained so is saved whole, and its training state goes on in a run without data parallelism."""
    model, other = adapted(path, "nf4")
    optimizer = train(model, WRAPS[wrap][0](model), other, 1e-4)
    autotp.TrainingState(model, optimizer, dp=grid()["dp"]).save(directory / "state", 3)
    first = wrap == "fsdp2" or grid()["dp"].get_local_rank() == 0  # one of the copies writes; of chunks autotp says which
    model.save_pretrained(directory / "adapter", is_main_process=first)
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(
        stand_for(read(path, "nf4"), AutoModelForCausalLM.from_pretrained(path)), directory / "adapter"
    )
    inputs = batch(loaded.get_base_model())
    torch.testing.assert_close(loaded(**inputs).logits, other.eval()(**inputs).logits, rtol=0, atol=1e-3)
    again = add(read(path, "nf4"))
    autotp.TrainingState(again, make_optimizer(again), dp=grid()["dp"]).load(directory / "state")
    torch.testing.assert_close(again.eval()(**inputs).logits, loaded(**inputs).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_saved_and_gone_on_from(ranks, saved, tmp_path, wrap):
    need("nf4")
    ranks.run(run_saves, saved, tmp_path, wrap, size=4)


def run_refuses(group, path):
    model, other = adapted(path, "torchao int8")
    with pytest.raises(AutoTPError, match=r"q_proj.weight'.* Int8Tensor \[64, 128\] can't be: .*ignored_params="):
        wrap_fully(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.get_base_model().model.layers)
    train(model, wrap_fully(model, ignore=True), other, 1e-4)  # the way out
    four = read(path, "nf4")
    for layer in four.model.layers:
        fully_shard(layer, mesh=grid()["dp"])
    with pytest.raises(AutoTPError, match=r"dequantize can't work on .* fully_shard"):
        autotp.dequantize(four)
    plain: Any = autotp.parallelize(tiny("llama", **SIZES), grid()["tp"])
    fully_shard(plain, mesh=grid()["dp"])
    with pytest.raises(AutoTPError, match=r"quantize can't work on .* call fully_shard after that"):
        autotp.quantize(plain, make_config("nf4"))
    plain(**batch(plain))  # as it was


def test_what_can_not_be_cut_is_refused(ranks, saved):
    need("nf4")
    need("torchao int8")
    ranks.run(run_refuses, saved, size=4)
