"""Conversations to packed rows, beside the calls of transformers that one rendering of each needs."""

import json
import os
import time
from pydoc_data.topics import topics

import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim
from dataload.samplers import GlobalShuffle, PackedBatchSampler
from dataload.text import Chat

COUNT = 4_000  # CHAT=100000 python -m benchmarks chat takes ten minutes
LENGTHS = 100_000
ROW = 8192
CHUNK = 20
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def talks(count):
    """Conversations of one to three questions and answers, about 600 tokens each: pieces of Python's help."""
    rng, text = np.random.default_rng(0), "\n".join(topics.values())
    for turns in rng.integers(1, 4, count).tolist():
        sizes = rng.lognormal(6.9, 0.8, 2 * turns).astype(int).clip(8, 8000) // turns
        starts = rng.integers(0, len(text) - 9000, 2 * turns)
        pieces = [text[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        yield [{"role": ("user", "assistant")[i % 2], "content": piece} for i, piece in enumerate(pieces)]


def trained(template):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    path = ROOT / f"v{VERSION}-chat-tokenizer.json"
    if not path.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|im_start|>", "<|im_end|>"]
        settings = {"vocab_size": 8000, "special_tokens": special, "initial_alphabet": alphabet}
        made.train_from_iterator(topics.values(), trainers.BpeTrainer(**settings, show_progress=False))
        made.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|im_end|>", chat_template=template)


def cpu(function):
    """CPU seconds of a call."""
    begun = time.process_time()
    function()
    return time.process_time() - begun


def in_chunks(transform, conversations):
    """CPU seconds of the calls that one rendering needs, of those for beginnings, and of the transform, interleaved."""
    tokenizer, spent = transform.tokenizer, {"calls": 0.0, "beginnings": 0.0, "transform": 0.0}
    has_markers = "generation %}" in tokenizer.chat_template

    def needed(talk):
        if has_markers:
            marked = {"return_dict": True, "return_assistant_tokens_mask": True}
            tokenizer.apply_chat_template(talk, tools=None, **marked)
        else:
            tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)

    def beginnings(talk):
        for end in range(1, 0 if has_markers else len(talk)):
            tokenizer.apply_chat_template(talk[:end], tokenize=False, add_generation_prompt=end % 2 == 1)

    for start in range(0, len(conversations), CHUNK):
        chunk = conversations[start : start + CHUNK]
        samples = [{"messages": talk} for talk in chunk]
        spent["calls"] += cpu(lambda chunk=chunk: [needed(talk) for talk in chunk] and None)
        spent["transform"] += cpu(lambda samples=samples: [transform(sample) and None for sample in samples])
        spent["beginnings"] += cpu(lambda chunk=chunk: [beginnings(talk) for talk in chunk])
    return spent


def packed(samples, lengths):
    """Serve an epoch of packed rows from samples in memory."""
    plan = PackedBatchSampler(
        sampler=GlobalShuffle(len(samples), 0), lengths=lengths, row_length=ROW, batch_size=4, strategy="best-fit"
    )
    pack = dataload.Pack({"labels": -100}, varlen=True)
    with dataload.Loader(dataload.MemorySource(samples), sampler=plan, collate=pack) as loader:
        for _ in loader:
            pass


def chat():
    count = int(os.environ.get("CHAT", COUNT))
    ROOT.mkdir(exist_ok=True)
    path = ROOT / f"v{VERSION}-chat-{count}.jsonl"
    if not path.exists():
        with open(path, "w") as file:
            for talk in talks(count):
                file.write(json.dumps({"messages": talk}) + "\n")
    source = dataload.open(path)
    reading = min(cpu(lambda: list(source)) for _ in range(3))
    conversations = [record["messages"] for record in source]
    title, rows = f"{count:,} conversations, Chat and Pack", []
    print(f"\n{title}, CPU time, without workers")
    for name, template in (("with markers", MARKED), ("without markers", CHATML)):
        transform = Chat(trained(template))
        in_chunks(transform, conversations[:CHUNK])  # templates are compiled
        spent = in_chunks(transform, conversations)
        some = [transform({"messages": talk}) for talk in conversations[:1000]]
        lengths = np.array([len(sample["input_ids"]) for sample in some])
        packing = (
            min(cpu(lambda some=some, lengths=lengths: packed(some, lengths)) for _ in range(3)) / len(some) * count
        )
        # Lengths are measured first, so all but packing is done twice.
        own = 2 * (spent["transform"] - spent["calls"] - spent["beginnings"] + reading) + packing
        more = {**spent, "reading": reading, "packing": packing}
        rows.append(aim(title, f"{name}: our own part of the calls", own / (2 * spent["calls"]), most=0.1, **more))
        print(f"  {'':64} renderings of beginnings: {spent['beginnings'] / spent['calls']:.2f} of the calls")
    every = np.random.default_rng(1).choice(lengths, LENGTHS)
    settings = {"lengths": every, "row_length": ROW, "batch_size": 4, "strategy": "best-fit", "window": 4096}
    plan = PackedBatchSampler(sampler=GlobalShuffle(LENGTHS, 0), **settings)
    rows.append(aim(title, f"fill of rows of {ROW:,}, window 4,096", every.sum() / (plan.items(0) * ROW), 0.99))
    return rows
