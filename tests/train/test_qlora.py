"""TRL's QLoRA on a base whose parts are quantised, beside the same script on one that transformers quantised whole.

Tests start jobs of their own, as Trainer takes the whole job for its: this file is also the script that their ranks run.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.jobs import run_job
from tests.models import tiny
from tests.train.test_trainer import choose_arguments, write_log
from tests.train.tiny import make_texts, make_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "vocab_size": 320}  # whole blocks of 64 on each rank


def make_trainer(path, directory):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    if "RANK" in os.environ:
        import autotp

        model = autotp.from_pretrained(path, quantization_config=config)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    own = dict(max_length=24, bf16=False, eval_strategy="no", load_best_model_at_end=False, gradient_checkpointing=True)
    arguments = choose_arguments(SFTConfig, directory, **own, save_strategy="steps", save_steps=1)
    torch.manual_seed(0)
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in make_texts(20)]),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def can_resume():
    """transformers 5.17 can't load any optimizer state in a job of several CPU ranks."""
    return Version(transformers.__version__) >= Version("5.24")


def main():
    path, directory = sys.argv[1], Path(sys.argv[2])
    trainer = make_trainer(path, directory)
    trainer.train()
    trainer.save_model(str(directory / "final"))
    write_log(trainer, directory / "log.json")
    if can_resume():
        again = make_trainer(path, directory / "resumed")
        again.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
        again.save_model(str(directory / "resumed" / "final"))


def test_qlora_equals_the_unsharded_run(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = tmp_path / "base"
    tiny("llama", **SIZES).save_pretrained(base)
    for name, size in (("plain", 0), ("tp", 2)):
        run_job(__file__, str(base), tmp_path / name, cwd=tmp_path, size=size)
    plain, own = (json.loads((tmp_path / name / "log.json").read_text()) for name in ("plain", "tp"))
    assert len(own) == 4
    for mine, theirs in zip(own, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2)  # TRL keeps adapters in bfloat16
    finals = [path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").glob("**/final/adapter_model.safetensors")]
    assert len(finals) == 1 + can_resume()
    for path in finals:
        plain, own = (load_file(tmp_path / name / path) for name in ("plain", "tp"))
        assert plain.keys() == own.keys()
        for key, value in plain.items():
            assert (own[key] - value).norm() <= 0.05 * value.norm(), key


if __name__ == "__main__":
    main()
