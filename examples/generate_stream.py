"""A chat whose answers are streamed: generate in a thread, and its text as it comes.

torchrun --nproc-per-node 2 examples/generate_stream.py "Why is the sky blue?"
"""

import os
import sys
from threading import Thread

from transformers import AutoTokenizer, TextIteratorStreamer

import autotp

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTIONS = sys.argv[1:] or ["why do old birds sing of rain?", "and the dogs?"]

tokenizer = AutoTokenizer.from_pretrained(NAME)
model = autotp.from_pretrained(NAME)  # AutoModelForCausalLM.from_pretrained(NAME)


def show(text):
    if int(os.environ["RANK"]) == 0:
        print(text, end="", flush=True)


chat = []
for question in QUESTIONS:
    chat.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=300)
    options = dict(max_new_tokens=24, do_sample=True, temperature=0.7, top_p=0.9)  # rank 0's draws on all ranks
    thread = Thread(target=model.generate, kwargs=dict(**inputs.to(model.device), **options, streamer=streamer))
    thread.start()
    show(f"> {question}\n")
    answer = ""
    for piece in streamer:
        answer += piece
        show(piece)
    thread.join()
    show("\n")
    chat.append({"role": "assistant", "content": answer})
