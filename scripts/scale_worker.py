"""One rank of scripts/bench_scale.py: measures one implementation of one shape; rank 0 prints a line for each measure."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import bench
import torch
import torch.distributed as dist
from measures import whole
from no_communication import no_communication
from shrink import randomize
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

MARK = "SCALE "
OUTPUTS, GRADIENTS = 1e-4, 1e-3  # how far a float32 model may be from the unsharded one
SMALL: dict[str, Any] = dict(hidden_size=128, intermediate_size=192, num_attention_heads=8, num_key_value_heads=4, vocab_size=515)


def say(**line: Any) -> None:
    if dist.get_rank() == 0:
        print(MARK + json.dumps(line), flush=True)


class Worker:
    """A rank of one case.

    Args:
        case: implementation, shape (a name and its fields), layers, tp, dp, the checkpoint's path, works, tokens, context, new,
            batches, steps.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.device = case, bench.start()
        self.tp, self.dp, self.ours = case["tp"], case["dp"], case["implementation"].startswith("autotp")
        self.mesh = dist.init_device_mesh(self.device.type, (self.dp, self.tp), mesh_dim_names=("dp", "tp"))
        shape = (bench.ROWS, case["tokens"])
        generator = torch.Generator().manual_seed(dist.get_rank() // self.tp)  # ranks of one model get one batch
        self.ids = torch.randint(0, case["fields"]["vocab_size"], shape, generator=generator).to(self.device)

    def run(self) -> None:
        """All works, one after another."""
        if self.ours and self.tp > 1:
            say(work="check", **self.check_numbers())
        started = time.perf_counter()
        self.model = self.load()
        self.trained = self.model
        if self.dp > 1:
            options: dict[str, Any] = dict(process_group=self.mesh["dp"].get_group(), gradient_as_bucket_view=True)
            self.trained = torch.nn.parallel.DistributedDataParallel(self.model, **options)
        self.model.generation_config.eos_token_id, self.model.generation_config.pad_token_id = None, 0
        say(work="load", s=round(time.perf_counter() - started, 1))
        for work in self.case["works"]:
            say(begin=work)
            say(work=work, **(self.decode(int(work.split()[1])) if work.startswith("decode") else self.step(work)))

    # -- models ----------------------------------------------------------------------------------------------------------

    def load(self) -> Any:
        """The model, by the implementation that is measured."""
        name, path = self.case["implementation"], self.case["path"]
        if name in ("one GPU", "transformers TP"):
            return bench.LOADERS[name](path, self.device)
        if name == "DeepSpeed AutoTP":
            return load_deepspeed(path, self.tp, self.device)
        if name == "autotp, norms apart":
            part_norms()
        return autotp.from_pretrained(path, self.mesh["tp"], sequence_parallel=name == "autotp, dealt tokens")

    # -- measures --------------------------------------------------------------------------------------------------------

    def step(self, work: str) -> dict[str, Any]:
        """A training step or a prompt: as it is, and with communication cut out."""
        self.model.train(work == "train")
        if work == "train":
            self.release()
        call = bench.make_steps(self.trained if work == "train" else self.model, self.ids)[work]
        found = self.time(call)
        if self.ours and self.tp * self.dp > 1:
            # Copies of the model keep their gradients to themselves, too.
            apart = self.trained.no_sync() if work == "train" and self.dp > 1 else contextlib.nullcontext()
            inside = no_communication(self.model.autotp_group) if self.tp > 1 else contextlib.nullcontext()
            with apart, inside:
                found["cut_ms"] = self.time(call)["ms"]
            found["exposed_ms"] = round(found["ms"] - found["cut_ms"], 2)
        if work == "train":
            found["losses"] = [round(float(loss), 4) for loss in call.losses[:1]]
        rows = bench.ROWS * self.dp if work == "train" else 1
        return found | {"tokens": rows * self.case["tokens"]}

    def time(self, call: Callable[[], Any]) -> dict[str, Any]:
        return bench.time_step(call, 3, self.case["steps"], self.device)

    def decode(self, batch: int) -> dict[str, Any]:
        """`generate` of `batch` rows: milliseconds of one step, the prompt's share taken off."""
        import bench_generate

        self.model.eval()
        context, new = self.case["context"], self.case["new"]
        reset_peak(self.device)

        def generate(count: int) -> None:
            bench_generate.generate(self.model, batch, context, count)

        generate(new)
        generate(1)
        whole_ms, first_ms = (bench_generate.time_ms(lambda count=count: generate(count), 3) for count in (new, 1))
        return {
            "ms": round((whole_ms - first_ms) / (new - 1), 3),
            "first_ms": round(first_ms, 2),
            "ms_a_token": round(whole_ms / new, 3),
            "tokens": batch,
            "peak_gib": None if self.device.type == "cpu" else round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }

    def release(self) -> None:
        """Let go of what decoding keeps, so that it is not in the peak of training."""
        if self.ours:
            autotp.release(self.model)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- numbers ---------------------------------------------------------------------------------------------------------

    def check_numbers(self) -> dict[str, Any]:
        """A small model in float32, sharded as the large one will be, against itself unsharded."""
        torch.manual_seed(0)
        reference = randomize(LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=2))).eval().to(self.device)
        dealt = self.case["implementation"] == "autotp, dealt tokens"
        model = autotp.parallelize(copy.deepcopy(reference), self.mesh["tp"], sequence_parallel=dealt)
        ids = torch.randint(3, 515, (2, 33), generator=torch.Generator().manual_seed(0)).to(self.device)
        grads, logits = [], []
        for each in (reference, model):
            out = each(input_ids=ids, labels=ids)
            out.loss.backward()
            grads.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
            with torch.no_grad():
                logits.append(each(input_ids=ids).logits)
        found, apart = whole(grads[1], model)
        sizes = {name: float(grad.abs().max()) for name, grad in grads[0].items()}
        least = 1e-3 * max(sizes.values())  # smaller gradients are held against that
        worst = max(float((found[name] - grad).abs().max()) / max(sizes[name], least) for name, grad in grads[0].items())
        error = float((logits[1] - logits[0]).abs().max() / logits[0].abs().max())
        good = error <= OUTPUTS and worst <= GRADIENTS and apart <= GRADIENTS * max(sizes.values())
        return {"logits": error, "gradients": worst, "good": good}


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def part_norms() -> None:
    """Sums over the ranks and the norms after them in two launches while decoding, in place of one."""
    from autotp.layers import embedding, linear_product

    for module in (linear_product, embedding):
        setattr(module, "pend", lambda *_: None)  # noqa: B010


def load_deepspeed(path: str, tp: int, device: torch.device) -> Any:
    """Sharded by DeepSpeed's AutoTP; steps run its module, with this benchmark's optimizer as for all."""
    import deepspeed  # type: ignore[import-not-found]

    model: Any = bench.LOADERS["one GPU"](path, device)
    config = {"train_micro_batch_size_per_gpu": bench.ROWS, "tensor_parallel": {"autotp_size": tp}}
    return deepspeed.initialize(model=model, config=config)[0].module


def run(case: dict[str, Any]) -> None:
    """What one rank does: write the checkpoint, or measure."""
    if "save" in case:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        bench.save_random(case["save"], case["fields"], case["layers"], device)
        return
    Worker(case).run()
    dist.barrier()
    dist.destroy_process_group()
