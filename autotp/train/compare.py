"""One rank's part of `autotp verify`: a checkpoint loaded twice, unsharded and parallelized, compared on one batch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AutoTPError
from ..inject.examples import make_examples
from ..inject.load import find_checkpoint
from ..inject.plan import Plan
from ..inject.rewrite import from_pretrained
from ..layers.base import find_group
from .verify import VerifyReport, read_logits, verify

BATCH_SIZE, LENGTH = 2, 32
_ASIDE = ("attention_mask", "token_type_ids", "use_cache")  # beside the inputs, and not worth a word
TEXT = (
    "The river rises in the hills above the town, where rain falls on most days of the year, and it is still narrow when it "
    "passes the old mill. In 1854 a bridge of three arches was built here; the middle one carries a plate with the names of "
    "the twelve people who paid for it. Further down, the valley opens and the water slows. Farmers once let it flood their "
    "meadows in winter, because the mud that stayed behind in March was worth more than a season's hay. "
) * 4


def compare_checkpoint(path: str, plan: Plan, dtype: torch.dtype) -> tuple[VerifyReport, str]:
    """Load `path` as `plan` says and as transformers does, and compare them; also what the batch was made of.

    Raises:
        AutoTPError: as `from_pretrained`, or the model can't be called with what can be made for it.
    """
    model, info = from_pretrained(path, plan=plan, dtype=dtype, output_loading_info=True)
    if lacking := sorted(info["missing_keys"]):
        raise AutoTPError(f"{path} lacks {len(lacking)} tensor(s) of {type(model).__name__}, {lacking[0]} among them, which are "
                          f"drawn at each load: compare a checkpoint that holds them all")  # fmt: skip
    group = find_group(model)
    if group is None:
        raise AutoTPError(f"from_pretrained({path!r}) gave a model that is not parallelized")
    with group.together("loading the unsharded model"):
        directory = find_checkpoint(path)
        reference = load_whole(type(model), directory, dtype)
        batch, said = make_batch(reference, directory)
    batch = {key: value.to(group.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return verify(model, batch, reference=reference.to(group.device)), said


def load_whole(cls: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """The checkpoint as transformers loads it, in eval mode."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return cls.from_pretrained(directory, dtype=dtype).eval()


def make_batch(model: nn.Module, directory: Path) -> tuple[dict[str, Any], str]:
    """Arguments of `model`'s forward, and what they are: text where the checkpoint has a tokenizer, else random inputs."""

    def run(call: dict[str, Any]) -> Any:
        with torch.no_grad():
            return model(**_cast(call, dtype))

    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    call = make_examples(model, BATCH_SIZE, LENGTH, run=run)[0]
    batch, said = _cast(call, dtype), f"random {' and '.join(name for name in call if name not in _ASIDE)}"
    ids = batch.get("input_ids")
    if ids is not None and ids.ndim == 2 and not any(torch.is_tensor(v) and v.is_floating_point() for v in batch.values()):
        text = read_text(directory, ids.shape[0], ids.shape[1])
        if text is not None and int(text.max()) < _count_rows(model):
            batch["input_ids"], said = text, "text as input_ids"
            batch.pop("token_type_ids", None)  # plain text has none
    batch["labels"] = _choose_labels(model, batch, read_logits(run(batch)))
    return batch, said


def read_text(directory: Path, batch_size: int, length: int) -> Tensor | None:
    """A piece of English as token ids `[batch_size, length]`; None if the checkpoint has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        ids = AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # transformers raises whatever its many tokenizers do where files are missing
        return None
    wanted = batch_size * length
    return torch.tensor(ids[:wanted]).view(batch_size, length) if len(ids) >= wanted else None


def _choose_labels(model: nn.Module, batch: dict[str, Any], logits: Tensor) -> Tensor | None:
    """The ids whose logits the model gives, for a loss of its own; None where there are none."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    for name in ("decoder_input_ids", "input_ids"):
        ids = batch.get(name)
        if ids is not None and logits.shape[:-1] == ids.shape and logits.shape[-1] > int(ids.max()):
            return ids
    return None


def _cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in call.items()}


def _count_rows(model: Any) -> int:
    """Rows of the input embedding."""
    return model.get_input_embeddings().weight.shape[0]
