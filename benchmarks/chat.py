"""Conversations to packed rows, beside the calls of transformers that one rendering of each needs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim, cpu_seconds_of
from dataload.catalog.arrays import list_data, remove
from dataload.convert import convert
from dataload.convert.measuring import measure_mapped
from dataload.samplers import GlobalShuffle, PackedBatchSampler
from dataload.text import Chat

COUNT = 4_000  # CHAT=100000 python -m benchmarks chat takes ten minutes
LENGTHS = 100_000
BESIDE_TRL = 10_000  # with fewer, the workers' start takes most of the time
ROW = 8192
TOKENIZER = ROOT / f"v{VERSION}-chat-tokenizer.json"
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


def written(count):
    """The path of a JSON Lines file of conversations."""
    ROOT.mkdir(exist_ok=True)
    path = ROOT / f"v{VERSION}-chat-{count}.jsonl"
    if not path.exists():
        with open(path, "w") as file:
            for talk in talks(count):
                file.write(json.dumps({"messages": talk}) + "\n")
    return path


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

    if not TOKENIZER.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|im_start|>", "<|im_end|>"]
        settings = {"vocab_size": 8000, "special_tokens": special, "initial_alphabet": alphabet}
        made.train_from_iterator(topics.values(), trainers.BpeTrainer(**settings, show_progress=False))
        made.save(str(TOKENIZER))
    return PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>", chat_template=template)


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
        spent["calls"] += cpu_seconds_of(lambda chunk=chunk: [needed(talk) for talk in chunk] and None)
        spent["transform"] += cpu_seconds_of(lambda samples=samples: [transform(sample) and None for sample in samples])
        spent["beginnings"] += cpu_seconds_of(lambda chunk=chunk: [beginnings(talk) for talk in chunk])
    return spent


def order_of(lengths, **settings):
    """Batches of four packed rows of conversations in a global shuffle."""
    settings = {"row_length": ROW, "batch_size": 4, "strategy": "best-fit", **settings}
    return PackedBatchSampler(sampler=GlobalShuffle(len(lengths), 0), lengths=lengths, **settings)


def packed(source, lengths, **settings):
    """Serve an epoch of packed rows; return their number."""
    pack = dataload.Pack({"labels": -100}, varlen=True)
    with dataload.Loader(source, sampler=order_of(lengths), collate=pack, **settings) as loader:
        return sum(len(batch["input_ids"]) for batch in loader)


def chat():
    count = int(os.environ.get("CHAT", COUNT))
    source = dataload.open(written(count))
    reading = cpu_seconds_of(lambda: list(source), calls=3)
    conversations = [record["messages"] for record in source]
    title, rows = f"{count:,} conversations, Chat and Pack", []
    print(f"\n{title}, CPU time, without workers")
    for name, template in (("with markers", MARKED), ("without markers", CHATML)):
        transform = Chat(trained(template))
        in_chunks(transform, conversations[:CHUNK])  # templates are compiled
        spent = in_chunks(transform, conversations)
        some = [transform({"messages": talk}) for talk in conversations[:1000]]
        lengths = np.array([len(sample["input_ids"]) for sample in some])
        samples = dataload.MemorySource(some)
        seconds = cpu_seconds_of(lambda samples=samples, lengths=lengths: packed(samples, lengths), calls=3)
        packing = seconds / len(some) * count
        # Lengths are measured first, so all but packing is done twice.
        own = 2 * (spent["transform"] - spent["calls"] - spent["beginnings"] + reading) + packing
        more = {**spent, "reading": reading, "packing": packing}
        rows.append(aim(title, f"{name}: our own part of the calls", own / (2 * spent["calls"]), most=0.1, **more))
        print(f"  {'':64} renderings of beginnings: {spent['beginnings'] / spent['calls']:.2f} of the calls")
    every = np.random.default_rng(1).choice(lengths, LENGTHS)
    filled = every.sum() / (order_of(every, window=4096).items(0) * ROW)
    rows.append(aim(title, f"fill of rows of {ROW:,}, window 4,096", filled, 0.99))
    return rows + beside_trl()


def beside_trl():
    """Measured lengths and an epoch of packed rows, beside TRL's preparation and first epoch of the same."""
    python = os.environ.get("TRL_PYTHON")
    if not python or not Path(python).exists():
        print("TRL_PYTHON names no Python with TRL, so TRL is left out")
        return []
    trained(MARKED)
    path, first = str(written(BESIDE_TRL)), str(min(os.sched_getaffinity(0)))
    script = str(Path(__file__).with_name("peers") / "trl_epoch.py")

    def seconds(command, workers):
        one_core = [] if workers else ["taskset", "-c", first]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        made = subprocess.run([*one_core, *command], capture_output=True, text=True, check=True, env=environment)
        found = json.loads(made.stdout.splitlines()[-1])
        print(f"  {'TRL' if command[0] == python else 'ours'}, {workers} workers: {found}")
        return found["prepare"] + found["epoch"]

    own, written_first, theirs = (
        [min(seconds(command(workers), workers) for _ in range(2)) for workers in (0, 2)]
        for command in (
            lambda workers: [sys.executable, "-m", "benchmarks.chat", path, str(workers), "lengths"],
            lambda workers: [sys.executable, "-m", "benchmarks.chat", path, str(workers), "tokens"],
            lambda workers: [python, script, path, str(TOKENIZER), MARKED, str(ROW), str(workers)],
        )
    )
    title = f"{BESIDE_TRL:,} conversations, prepared and read once, by the clock"
    return [
        aim(title, "TRL / ours, one core", theirs[0] / own[0], 1.0, own=own[0], trl=theirs[0]),
        aim(title, "ours, one core / two workers", own[0] / own[1], 1.8, own=own[1]),
        aim(title, "TRL / ours, two workers", theirs[1] / own[1], 1.0, trl=theirs[1]),
        aim(title, "TRL / ours, tokens written first, one core", theirs[0] / written_first[0], 1.0),
        aim(title, "TRL / ours, tokens written first, two workers", theirs[1] / written_first[1], 1.0),
    ]


def epoch(path, workers, prepares):
    """Print the seconds that lengths, or tokens that are written, and an epoch of packed rows take."""
    transform = Chat(trained(MARKED))
    remove(each for each in list_data(str(ROOT)) if each.kind == "filter")  # of the run before
    begun = time.perf_counter()
    source = dataload.open(path)
    if prepares == "tokens":
        target, parts = str(ROOT / "chat-tokens.syr"), {"engine": "local"} if workers else {}
        convert(source, target, map=transform, overwrite=True, shards=2, **parts)
        source, transform = dataload.open(str(ROOT / "chat-tokens-*.syr")), None
        lengths = dataload.record_lengths(source, "input_ids")
    else:
        lengths = measure_mapped(source, transform).fields["input_ids"]
    prepared = time.perf_counter()
    processes = {"num_workers": workers, "executor": "processes"} if workers else {}
    rows = packed(source, lengths, transform=transform, **processes)
    print(json.dumps({"prepare": prepared - begun, "epoch": time.perf_counter() - prepared, "rows": rows}))


if __name__ == "__main__":
    epoch(sys.argv[1], int(sys.argv[2]), sys.argv[3])
