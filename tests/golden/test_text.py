"""Batches of conversations equal those of TRL (stored, see text/README.md) and of transformers' collators."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataload import Collate, Pack, Pad
from dataload.text import Chat, Pairs, Preference

transformers = pytest.importorskip("transformers")
HERE = Path(__file__).parent / "text"
TALKS = json.loads((HERE / "conversations.json").read_text())
EXPECTED = json.loads((HERE / "expected.json").read_text())
POLICIES = {"input_ids": Pad(0), "labels": Pad(-100), "attention_mask": Pad(0)}


def load(name):
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    made.chat_template = (HERE / "templates" / f"{name}.jinja").read_text()
    return made


def talks_of(name):
    has_system = not name.startswith(("gemma", "mistral"))
    return [*TALKS["plain"], *(TALKS["system"] if has_system else [])]


def samples_of(kind, name, tools):
    transform = Chat(load(name), train_on=kind)
    talks = TALKS["tools"] if tools else talks_of(name)
    return [transform({"messages": talk, "tools": tools}) for talk in talks]


@pytest.mark.parametrize("case", [case for case in EXPECTED if case.startswith(("assistant", "last", "all"))])
def test_labels_are_those_of_the_sft_trainer(case):
    kind, *rest, name = case.split()
    batch = Collate(POLICIES)(samples_of(kind, name, TALKS["tool_schemas"] if rest else None))
    expected = {key: np.array(value) for key, value in EXPECTED[case].items()}
    assert (batch["input_ids"] == expected["input_ids"]).all()
    assert (batch["attention_mask"] == expected["attention_mask"]).all()
    # TRL keeps the first token of a text as a label, which its models do not use.
    assert (batch["labels"][:, 1:] == expected["labels"][:, 1:]).all()
    assert (batch["labels"] >= 0).any(axis=1).all()


@pytest.mark.parametrize("case", [case for case in EXPECTED if case.startswith("preference")])
def test_preferences_are_those_of_the_dpo_trainer(case):
    name = case.split()[1]
    transform = Preference(load(name))
    pairs = [
        {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": [{"role": "assistant", "content": f"No {i}"}]}
        for i, talk in enumerate(talks_of(name))
        if not talk[-1]["content"].startswith("\n")
    ]
    batch = Pairs(POLICIES)([transform(pair) for pair in pairs])
    expected = {key: np.array(value) for key, value in EXPECTED[case].items()}
    assert (batch["input_ids"] == expected["input_ids"]).all()
    assert (batch["attention_mask"] == expected["attention_mask"]).all()
    assert ((batch["labels"] >= 0) == expected["completion_mask"]).all()


def test_rows_without_padding_are_those_of_trl_and_transformers():
    samples = [
        {name: sample[name] for name in ("input_ids", "labels")}
        for sample in samples_of("assistant", "llama3_training", None)
    ]
    batch = Pack({"labels": -100}, varlen=True)(samples)
    flattening = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="np"
    )
    for expected in (EXPECTED["flat"], flattening(samples)):
        for name in ("input_ids", "labels", "position_ids", "seq_idx"):
            assert batch[name].tolist() == np.asarray(expected[name]).tolist(), name
        assert batch["cu_seqlens"].tolist() == np.asarray(expected["cu_seq_lens_q"]).tolist()
        assert batch["max_seqlen"] == expected["max_length_q"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_that_of_transformers(side):
    samples = samples_of("assistant", "chatml", None)
    tokenizer = load("chatml")
    tokenizer.padding_side = side
    plain = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    expected = transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="np")(plain)
    policies = {name: Pad(pad.value, to=8, side=side) for name, pad in POLICIES.items()}
    batch = Collate(policies)(samples)
    for name, column in batch.items():
        assert (column == expected[name]).all()
