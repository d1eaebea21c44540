"""The arguments of each command, and the page that `--help` prints for it."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any

from ..train.options import WHEN_DEALT, TrainOptions
from .generate import run_generate
from .plan import run_plan
from .shard import run_merge, run_reshard, run_shard
from .train import run_train
from .verify import DTYPES, run_verify

PRECISIONS = ("fp8", "fp8-rowwise", "fp8-blockwise", "fp8-weights")  # names of inject/precision.py, which is read when needed

SUMMARY = """\
Make a Hugging Face model tensor-parallel: each GPU (or process) holds a slice
of every layer.

  autotp plan MODEL --tp 2      what would be split; no weights are read
  autotp verify MODEL --tp 2    does the split model compute the same?
  autotp train MODEL --tp 2 --data FILE --out DIR
                                train, and save a plain checkpoint
  autotp generate MODEL --tp 2 --prompt TEXT
                                what the model says, and how fast
  autotp shard MODEL OUT --tp 4 cut a checkpoint beforehand: one file a rank
  autotp reshard OUT NEW --tp 2 cut it for another number of ranks
  autotp merge OUT PLAIN        put it together again

MODEL is a hub id or a directory.
"""
PLAN_PAGE = """\
The plan is found in the model itself, and proved to compute what the model
computes, forward and backward, before anything is printed. Only the config is
read: no weights, no GPU. What can't be split stays whole; the last part of the
table says why.
"""
PLAN_END = """\
examples:
  autotp plan HuggingFaceTB/SmolLM2-135M-Instruct --tp 2
  autotp plan ./my-model --tp 8 --json > plan.json   # may be edited
  autotp plan ./my-model --tp 8 --plan plan.json     # an edited plan, proved

exit codes:
  0 there is a plan   1 it splits nothing   2 an error, in one message
  130 interrupted (Ctrl-C)
"""
VERIFY_PAGE = """\
The checkpoint is loaded twice, unsharded and split over N ranks started here;
loss, logits and every gradient of one batch are compared. It takes memory for
both, on GPUs where there are any (one for each rank), else on the CPU.
"""
VERIFY_END = """\
examples:
  autotp verify ./my-model --tp 2
  autotp verify ./my-model --tp 2 --dtype bfloat16 --json
  autotp verify ./my-model --tp 2 --plan plan.json

exit codes:
  0 both compute the same   1 they differ   2 an error, in one message
  130 interrupted (Ctrl-C)
"""
SHARD_PAGE = """\
Cuts a checkpoint for N ranks: OUT gets one safetensors file a rank, which
from_pretrained then reads from end to end; over another number of ranks it
puts the tensors together. No GPU and no other process are needed, and one part
of one tensor is in memory at a time. OUT must not hold a checkpoint.
"""
SHARD_END = """\
examples:
  autotp shard ./my-model ./my-model-tp4 --tp 4
  autotp train ./my-model-tp4 --tp 4 --data book.txt --out out

exit codes:
  0 written   2 an error, in one message   130 interrupted (Ctrl-C)
"""
MERGE_PAGE = """\
Puts together what `autotp shard` cut: PLAIN is a checkpoint that plain
transformers loads, every tensor bit for bit what was cut, in the model's own
names and layout. One tensor is in memory at a time.
"""
TRAIN_PAGE = """\
Trains a causal language model over tp x dp ranks: each holds 1/tp of weights,
gradients and optimizer states, and dp copies of the model share the data. The
ranks are started here (one GPU each, or processes on the CPU where there is no
GPU), or by torchrun or `accelerate launch`, as tp x dp processes.
The trained model is saved to --out, where plain transformers loads it.
"""
TRAIN_END = """\
examples:
  autotp train HuggingFaceTB/SmolLM2-135M-Instruct --tp 2 --data book.txt \\
      --out out --steps 200
  autotp train ./my-model --tp 4 --dp 2 --data chats.jsonl --completions-only \\
      --out out --lr 2e-5 --lr-schedule cosine --warmup 0.1 --save-every 500
  autotp train --config run.yaml --lr 1e-5   # the command line wins
  torchrun --nproc-per-node 4 -m autotp.cli train --config run.yaml

a run.yaml, by the names of these options (paths count from where you are):
  model: ./my-model
  tp: 4
  data: [a.txt, b.txt]
  out: out
  lr: 1e-5

Ctrl-C once: the step is finished, all is saved, and the command that goes on
from there is printed. Twice: it ends at once. When something goes wrong, the
message says what to do, and OUT/autotp.log has what the ranks said. A run may
go on over other --tp and --dp, with as many sequences in a step.

exit codes:
  0 trained and saved   2 an error, in one message   130 interrupted (Ctrl-C)
"""
GENERATE_PAGE = """\
Splits the checkpoint over N ranks started here (one GPU each, or processes on
the CPU where there is no GPU), prints the text token by token, and then the
time to the first token, tokens a second, and memory. --bench generates the
same with the unsharded model on the first rank's device, in the same run.
"""
GENERATE_END = """\
examples:
  autotp generate ./my-model --tp 2 --prompt "The river rises"
  autotp generate ./my-model --tp 2 --chat --prompt "Why is the sky blue?" \\
      --sample --temperature 0.7 --top-p 0.9 --max-new-tokens 400
  autotp generate ./my-model --tp 2 --prompt - --bench < prompt.txt

The text goes to stdout, the numbers to stderr.

exit codes:
  0 done   2 an error, in one message   130 interrupted (Ctrl-C)
"""
# The options of `train` by group: name of the field in TrainOptions, metavar (None for a switch), and what it is.
TRAIN_GROUPS: dict[str, list[tuple[str, str | None, str]]] = {
    "what is trained, and where it goes": [
        ("data", "FILE", "what to train on: text, .jsonl (text or chats), .parquet or .arrow files"),
        ("out", "DIR", "where checkpoints and the trained model go"),
        ("tp", "N", "tensor-parallel size: ranks that share one model"),
        ("dp", "N", "data-parallel size: copies of the model"),
        ("plan", "FILE.json", "a plan that `autotp plan --json` printed, edited or not; proved again"),
        ("sequence_parallel", "WHEN", "tokens are dealt to the tp ranks between split regions: never, auto or always"),
    ],
    "data": [
        ("text_field", "NAME", "the field of JSONL, parquet or arrow that holds the text"),
        ("seq_length", "N", "tokens in a row"),
        ("batch_size", "N", "rows in a micro-batch, on each copy of the model"),
        ("grad_accum", "N", "micro-batches in a step"),
        ("packing", None, "join texts and cut them into full rows; off: each text is a row, padded"),
        ("completions_only", None, "of chats, only the assistant's words count in the loss"),
        ("seed", "N", "order of the data, dropout"),
    ],
    "optimizer (AdamW)": [
        ("steps", "N", "optimizer steps"),
        ("epochs", "N", "instead of --steps: passes over the data; neither: one pass"),
        ("lr", "X", "highest learning rate"),
        ("lr_schedule", "NAME", "constant, linear or cosine: how it falls to 0 after the warm-up"),
        ("warmup", "X", "steps in which it rises from 0, or below 1 their share of all"),
        ("weight_decay", "X", "not of norms and biases"),
        ("betas", "X", "of both moments"),
        ("eps", "X", "AdamW's epsilon"),
        ("clip", "X", "the gradients' global norm is cut to this; 0: never"),
    ],
    "numbers and memory": [
        ("dtype", "NAME", "of the weights: bfloat16, float32 or float16"),
        ("master_weights", None, "the optimizer works on float32 copies of narrower weights"),
        ("gradient_checkpointing", None, "compute activations again in the backward pass instead of keeping them"),
    ],
    "evaluation, checkpoints, logs": [
        ("eval_data", "FILE", "files whose loss is measured"),
        ("eval_every", "N", "steps between two evaluations; 0: one at the end"),
        ("eval_batches", "N", "batches in an evaluation; all if not given"),
        ("save_every", "N", "steps between two checkpoints to resume from; 0: only when interrupted"),
        ("keep_last", "N", "how many of these checkpoints are left; 0: all"),
        ("async_save", None, "write them beside the training, from a copy in the CPU's memory"),
        ("resume", "DIR", "go on from this checkpoint-STEP; `auto`: from the newest in --out, if any"),
        ("log", "FILE", "JSONL: one line for each step"),
        ("tensorboard", "DIR", "the same for TensorBoard"),
    ],
}


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="autotp", description=SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter, usage="autotp COMMAND ..."
    )
    commands = parser.add_subparsers(
        required=True,
        metavar="COMMAND",
        help="plan, verify, train, generate, shard, reshard or merge; `autotp COMMAND --help` is a page on it, with examples",
    )

    plan = _add_command(commands, "plan", "MODEL --tp N [options]", PLAN_PAGE, PLAN_END)
    add_plan_arguments(plan, "hub id or directory; no weights are read", "print the plan as JSON")
    plan.set_defaults(run=run_plan)

    check = _add_command(commands, "verify", "MODEL --tp N [options]", VERIFY_PAGE, VERIFY_END)
    add_plan_arguments(check, "hub id or directory", "print the report as one JSON object")
    check.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights of both (%(default)s)")
    check.set_defaults(run=run_verify)

    add_shard_commands(commands)

    usage = "MODEL --tp N --data FILE --out DIR [options]\n       autotp train --config FILE.yaml [options]"
    train = _add_command(commands, "train", usage, TRAIN_PAGE, TRAIN_END)
    add_train_arguments(train)
    train.set_defaults(run=run_train)

    speak = _add_command(commands, "generate", "MODEL --tp N --prompt TEXT [options]", GENERATE_PAGE, GENERATE_END)
    add_plan_arguments(speak, "hub id or directory", "print text and numbers as one JSON object, at the end")
    add_generate_arguments(speak)
    speak.set_defaults(run=run_generate)
    return parser


def _add_command(commands: Any, name: str, usage: str, page: str, end: str) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(
        name,
        usage=f"autotp {name} {usage}",
        description=page,
        epilog=end,
        formatter_class=layout,
        allow_abbrev=False,
    )


def add_plan_arguments(parser: argparse.ArgumentParser, model_help: str, json_help: str) -> None:
    """The arguments of a command that makes a plan."""
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("--tp", type=positive, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--plan", metavar="FILE.json", help="a plan that `autotp plan --json` printed, edited or not; proved again"
    )
    parser.add_argument(
        "--few-units", choices=("whole", "refuse"), default="whole",
        help="what has fewer units (neurons, heads) than there are ranks stays whole, or is an error (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sequence-parallel", choices=WHEN_DEALT, default="never",
        help="when tokens are dealt to the ranks between split regions; auto: where there are many (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=PRECISIONS, metavar="RECIPE",
        help="linears multiply in FP8: " + ", ".join(PRECISIONS) + " (weights are kept in it)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help=json_help)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """What is generated, and how."""
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, put into the chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="tokens at most (%(default)s)")
    parser.add_argument("--sample", action="store_true", help="draw tokens; otherwise the likeliest is taken")
    parser.add_argument("--temperature", type=_temperature, metavar="X", help="of the draws (the model's own setting)")
    parser.add_argument("--top-k", type=positive, metavar="N", help="draw among the N likeliest (the model's own setting)")
    parser.add_argument("--top-p", type=_share, metavar="X", help="draw among the likeliest of this share (the model's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (%(default)s)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights; auto: as saved")
    parser.add_argument("--bench", action="store_true", help="generate with the unsharded model too, and compare")


def add_shard_commands(commands: Any) -> None:
    """The commands that cut checkpoints and put them together."""
    plan_help = "a plan that `autotp plan --json` printed, edited or not; proved again"
    shard = _add_command(commands, "shard", "MODEL OUT --tp N [--plan FILE.json]", SHARD_PAGE, SHARD_END)
    shard.add_argument("model", metavar="MODEL", help="hub id, or directory with weights, cut already or not")
    shard.set_defaults(run=run_shard)
    reshard = _add_command(commands, "reshard", "SHARDED OUT --tp N [--plan FILE.json]", SHARD_PAGE, SHARD_END)
    reshard.add_argument("model", metavar="SHARDED", help="directory that `autotp shard` made")
    reshard.set_defaults(run=run_reshard)
    for parser in (shard, reshard):
        parser.add_argument("out", metavar="OUT", help="directory to write")
        parser.add_argument("--tp", type=positive, required=True, metavar="N", help="number of ranks")
        parser.add_argument("--plan", metavar="FILE.json", help=plan_help)
    merge = _add_command(commands, "merge", "SHARDED PLAIN [--max-shard-size SIZE]", MERGE_PAGE, "")
    merge.add_argument("sharded", metavar="SHARDED", help="directory that `autotp shard` made")
    merge.add_argument("out", metavar="PLAIN", help="directory to write")
    merge.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file: a number of bytes, 5GB, 500MiB (5GB)"
    )
    merge.set_defaults(run=run_merge)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """An option for each field of TrainOptions; what is not given is not in the namespace, so that a config's value stands."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="hub id, or directory with safetensors or GGUF"
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="options in a file, by the same names; the command line wins")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    kinds = typing.get_type_hints(TrainOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
    for title, options in TRAIN_GROUPS.items():
        group = parser.add_argument_group(title)
        for name, metavar, said in options:
            settings: dict[str, Any] = dict(default=argparse.SUPPRESS, help=f"{said}{_say_default(defaults[name])}")
            if metavar is None:
                settings["action"] = argparse.BooleanOptionalAction
            else:
                settings |= dict(metavar=metavar, type=_read_as(kinds[name]))
                if typing.get_origin(_required(kinds[name])) is tuple:
                    settings["nargs"] = 2 if name == "betas" else "+"
            group.add_argument(f"--{name.replace('_', '-')}", **settings)


def _say_default(value: Any) -> str:
    if value is dataclasses.MISSING or value is None or value == "" or isinstance(value, bool):
        return " (on)" if value is True else ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})".replace("%", "%%")


def _required(kind: Any) -> Any:
    """`X` of an `X | None`."""
    options = [option for option in typing.get_args(kind) if option is not types.NoneType]
    return options[0] if isinstance(kind, types.UnionType) else kind


def _read_as(kind: Any) -> Any:
    """How the text of an option becomes the field's type, or the elements of its tuple."""
    kind = _required(kind)
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def positive(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def _temperature(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero and finite: leave --sample out for the likeliest tokens")
    return value


def _share(text: str) -> float:
    """A number above zero, one at most."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
