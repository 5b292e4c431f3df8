"""Tokenizers trained here, and published chat templates."""

import functools
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

transformers = pytest.importorskip("transformers")

TEMPLATES = Path(__file__).parents[1] / "golden/text/templates"
SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "[INST]", "[/INST]"),
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
]
_WORDS = ["Where is the sun? In the sky.", "user assistant system tool\n\n", "Grün wie Gras 🌱 and blue, as the sky is"]


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


@functools.cache
def trained(kind="bytes", vocabulary=400):
    """A BPE of bytes, as of GPT-2 and Llama 3; or of characters with marks for spaces, as of Llama 2 and Gemma."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet = ["\n"]
    settings = {"vocab_size": vocabulary, "special_tokens": SPECIAL, "show_progress": False}
    tokenizer.train_from_iterator(_WORDS * 3, trainers.BpeTrainer(initial_alphabet=alphabet, **settings))
    return tokenizer.to_str()


def make(name="chatml", kind="bytes", **settings):
    """A new tokenizer of transformers, with the chat template of that name."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained(kind)), **settings)
    made.chat_template = None if name is None else template(name)
    return made
