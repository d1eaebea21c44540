"""Makes a model tensor-parallel in place, and plain again: resolve, check everything on every rank, then swap."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import errors
from ..checkpoint.load import fill_from_source
from ..checkpoint.open import open_checkpoint
from ..checkpoint.save import save_pretrained
from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..generation.engine import PLACE
from ..generation.install import install_generation
from ..groups import resolve_group
from ..layers.attentions import watch_attentions
from ..layers.base import check_usable, find_group, index_parameters, mark_broken
from ..layers.entry import install_entry, remove_entry
from ..layers.fully import refuse_dealt
from ..layers.guards import install_guards, mark_model, unmark_model, warn_of_states
from ..layers.sibling_memory import lay_siblings
from ..layers.token_modules import watch_owners
from .adapted import find_root, list_wraps, parallelize_adapted
from .assemble import read_versions
from .attentions import find_values
from .attributes import restore_attributes
from .block import fuse_modules
from .callsites import remove_fixes
from .checks import check_agreement, check_alike, check_memory, check_options, digest_weights, refuse_quantised, refuse_wrapped
from .forwards import Forward, remove_forward
from .hints import spell
from .load import build_empty, find_checkpoint, find_dtype, read_kept_plan
from .plan import Plan
from .precision import check_device, check_precision, choose_products, install_products, remove_products, store_weights
from .quantise import check_configs, choose_linears, read_config
from .resize import resize_embeddings
from .rules import check_mode, hints_of, make_plan, reuse_plan
from .swap import rewrite_modules
from .threads import young_garbage
from .weights import cut_weights, join_weights

WATCHED = ("autotp_streams", "autotp_attentions")  # what the hooks on models and on the modules around chains note there


@young_garbage()
def parallelize(
    model: nn.Module,
    group_or_mesh: Any = None,
    *,
    plan: Any = "auto",
    inputs: Any = None,
    sequence_parallel: Any = False,
    precision: Any = None,
    logits: str = "auto",
    head: str = "auto",
    attrs: Any = None,
    timeout_s: float = 600,
) -> nn.Module:
    """Make `model` tensor-parallel in place over the ranks of a group; every rank calls it with the same model.

    The model keeps its class, module names, state-dict keys and Parameter objects; each Parameter holds this rank's shard
    afterwards. Weights on the CPU go to this rank's GPU shard by shard if the group communicates through NCCL.

    Args:
        model: a transformers model, equal on all ranks; with peft's LoRA adapters, or without.
        group_or_mesh: process group or one-axis DeviceMesh; None for all ranks of a torchrun job, set up here if need be.
        plan: "auto" or "hf" for the model's own Hugging Face plan, a dict, or a `Plan`; see `make_plan`.
        logits: what training with labels returns: "auto" no logits, "full" whole ones, "sharded" this rank's columns.
        head: "auto", or "whole" for losses computed outside the model that read the head's weight.
        attrs: hints for odd forward code, `{module name, pattern or class: {attribute: one value for each rank}}`, or
            `{..: {"forward": function}}`; proved like all else, see `make_plan`.
        timeout_s: seconds after which a rank that does not arrive is named.
        inputs: example calls for discovery and proof; see `make_plan`.
        sequence_parallel: True deals the tokens to the ranks between regions; "auto" where they are many; see `make_plan`.
        precision: which linears multiply in FP8, "fp8" or a dict of names to recipes; see `make_plan` and docs/fp8.md.

    Returns:
        `model` itself.

    Raises:
        AutoTPError: before anything is changed: no group, a plan that does not fit, ranks that differ, an option not built.
    """
    check_options(logits)
    check_precision(precision)
    check_mode(sequence_parallel)
    refuse_wrapped(model, "parallelize")
    if find_group(model) is not None:
        raise PlanError(f"this {type(model).__name__} is parallelized already; autotp.unshard(model) makes it plain again")
    check_usable(model)
    refuse_dealt(model.named_parameters(), "parallelize", "parallelize the plain model first, and call fully_shard after that")
    group = resolve_group(group_or_mesh, timeout_s)
    root = find_root(model)
    if root is not model or list_wraps(root):
        options = {
            "plan": plan,
            "inputs": inputs,
            "sequence_parallel": sequence_parallel,
            "logits": logits,
            "head": head,
            "attrs": attrs,
        }
        return parallelize_adapted(model, group, lambda plain: parallelize(plain, group, **options))
    group.arrive("parallelize")
    with group.together("making the plan"):
        if any(p.is_meta for p in model.parameters()):
            raise PlanError("the model has parameters on meta, which hold no weights: use autotp.from_pretrained(path)")
        refuse_quantised(model)
    made, forwards = plan_together(model, group, plan, head, inputs, attrs, sequence_parallel, precision)
    with group.together("checking memory"):
        check_memory(made, group, model)
    check_agreement(group, digest_weights(model))
    try:
        cut_weights(model, made, group)
        finish_rewrite(model, made, group, logits, forwards)
    except BaseException as error:
        mark_broken(model, f"rewriting it failed half way ({type(error).__name__}: {error})")
        raise
    return model


@young_garbage()
def from_pretrained(
    path: str,
    group_or_mesh: Any = None,
    *,
    plan: Any = "auto",
    inputs: Any = None,
    sequence_parallel: Any = False,
    precision: Any = None,
    logits: str = "auto",
    head: str = "auto",
    attrs: Any = None,
    timeout_s: float = 600,
    dtype: torch.dtype | str | None = "auto",
    trust_remote_code: bool = False,
    model_class: Any = None,
    config: Any = None,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    quantization_config: Any = None,
) -> Any:
    """`parallelize` of a checkpoint, of which each rank reads only its own slices.

    On the CPU what is one run of a safetensors file's bytes, in its dtype, stays in the mapped file, as transformers leaves it:
    the files may be replaced or removed while the model lives, but not written over in place or truncated.

    What the checkpoint lacks (the head of another task, say) is drawn as transformers draws it, equal parts of one whole on all
    ranks, and transformers' report says so.

    Args:
        path: a hub id; a directory with config.json and safetensors or `pytorch_model.bin` files, or one that `autotp shard`
            made; a GGUF file, or a directory with one, which is dequantized to `dtype`.
        dtype: of floating-point parameters; "auto" keeps the checkpoint's; None the config's own.
        trust_remote_code: run the model's own code, if it comes with any.
        model_class: what to build of the weights where it isn't the class that the config names: a class of transformers, or an
            Auto class.
        config: in place of the checkpoint's own.
        ignore_mismatched_sizes: what has another shape in the checkpoint is drawn as well, instead of refused.
        output_loading_info: return `(model, info)`, with transformers' `missing_keys`, `unexpected_keys` and `mismatched_keys`.
        quantization_config: transformers' BitsAndBytesConfig or TorchAoConfig: each rank quantises its parts of the linears as it
            reads them, for adapters to train on; see docs/lora.md.
        The others as in `parallelize`.

    Returns:
        the model, in evaluation mode.

    Raises:
        CheckpointError: a file is missing, truncated or does not fit the model.
        AutoTPError: as `parallelize`.
    """
    check_options(logits)
    check_precision(precision)
    check_mode(sequence_parallel)
    group = resolve_group(group_or_mesh, timeout_s)
    group.arrive("from_pretrained")
    with group.together("reading the checkpoint's headers"):
        quantiser = None if quantization_config is None else read_config(quantization_config, precision)
        source = open_checkpoint(find_checkpoint(path))
        wanted = find_dtype(source, dtype, trust_remote_code, config) if group.tp_rank == 0 else None
    wanted = group.broadcast_object(wanted)
    check_configs(group, quantization_config)
    asked_for = repr((model_class, None if config is None else config.to_dict(), ignore_mismatched_sizes))
    check_alike(group, {"library versions": read_versions(), "class, config or ignore_mismatched_sizes= arguments": asked_for})
    with source:
        with group.together("making the plan"):
            model = build_empty(source, wanted, trust_remote_code, model_class, config)
            asked = plan != "auto" or head != "auto" or inputs is not None or attrs is not None or sequence_parallel
            kept = None if asked else read_kept_plan(model, source, group.tp_size)
        made, forwards = plan_together(model, group, plan, head, inputs, attrs, sequence_parallel, precision, kept)
        then = store_weights(model, made)
        if quantiser is not None:
            with group.together("choosing what is quantised"):
                then = quantiser.pack_read(model, choose_linears(model, made.shards, quantiser))
        info = fill_from_source(model, made, source, group, ignore_mismatched_sizes=ignore_mismatched_sizes, then=then)
    finish_rewrite(model, made, group, logits, forwards)
    if quantiser is not None:
        quantiser.install(model)
    model.eval()
    return (model, info.to_dict()) if output_loading_info else model


def unshard(model: nn.Module) -> nn.Module:
    """The inverse of `parallelize`, in place and collective: plain modules that hold whole weights on every rank.

    Parameter objects survive; gradients, which were of shards, are dropped. Warns of optimizers that hold states of shards.

    Raises:
        AutoTPError: the model is not parallelized, or is broken.
    """
    refuse_wrapped(model, "unshard")
    group = find_group(model)
    if group is None:
        raise PlanError(f"this {type(model).__name__} is not parallelized")
    check_usable(model)
    refuse_dealt(model.named_parameters(), "unshard", "autotp.save_pretrained writes it whole, and plain transformers loads that")
    warn_of_states(model)
    group.arrive("unshard")
    root = find_root(model)
    remove_entry(root)
    unmark_model(root)
    try:
        join_weights(model)
    except BaseException as error:
        mark_broken(model, f"unsharding it failed half way ({type(error).__name__}: {error})")
        raise
    remove_products(model)
    for module in model.modules():
        restore_attributes(module)
        remove_fixes(module)
        remove_forward(module)
        for note in WATCHED:
            module.__dict__.pop(note, None)
    for note in ("autotp_plan", "autotp_group", PLACE):
        root.__dict__.pop(note, None)
    return model


def plan_together(
    model: nn.Module,
    group: TPGroup,
    plan: Any,
    head: str,
    inputs: Any,
    attrs: Any,
    sequence_parallel: bool | str = False,
    precision: Any = None,
    kept: Plan | None = None,
) -> tuple[Plan, dict[str, Forward]]:
    """The plan that rank 0 makes and proves, and the forwards that it needs, on every rank; all must have asked for the same.

    `kept`, a plan that a checkpoint was cut with, is taken where it still proves.

    Raises:
        AutoTPError: rank 0 could make none, or ranks asked for different ones.
    """
    asked = plan.digest() if isinstance(plan, Plan) else repr(spell(plan))
    given = {"head= arguments": head, "attrs= arguments": repr(spell(attrs)), "sequence_parallel= arguments": sequence_parallel}
    given["precision= arguments"] = repr(precision)
    check_alike(group, {"plan= arguments": asked, **given})
    made = failure = None
    if group.tp_rank == 0:
        try:
            reused = None if kept is None else reuse_plan(model, group.tp_size, kept)
            made = reused or make_plan(model, group.tp_size, plan, head, inputs, "whole", attrs, sequence_parallel)
            made = choose_products(model, made, precision)
            check_device(made, group)
            made = made.to_json()
        except Exception as error:  # every rank has to hear of it
            failure = error
        gc.collect()  # what the proof ran on refers to itself: gone before the weights come
    text, failed = group.broadcast_object((made, None if failure is None else (type(failure).__name__, str(failure))))
    if failure is not None:
        raise failure
    if failed is not None:
        raise getattr(errors, failed[0], AutoTPError)(failed[1])
    return Plan.from_json(text), hints_of(model, group.tp_size, plan, attrs).forwards


# -- the change ---------------------------------------------------------------------------------------------------------


def finish_rewrite(model: nn.Module, plan: Plan, group: TPGroup, logits: str, forwards: Mapping[str, Forward]) -> None:
    """Swap the modules' forwards, and put hooks, guards and marks in place; the data is cut already."""
    fuse_modules(model, plan)
    rewrite_modules(model, plan, group, forwards)
    install_products(model, plan, group)
    lay_siblings(model)
    model.__dict__["autotp_plan"], model.__dict__["autotp_group"] = plan, group
    install_entry(model, group, plan.head, plan.loss, logits)
    model.__dict__["autotp_entry"].handles += watch_owners(model) + watch_attentions(model, group, find_values(plan))
    install_guards(save=save_pretrained, resize=resize_embeddings)
    install_generation()
    mark_model(model, group)
    index_parameters(model)
