"""Write what TRL's trainers make of conversations to expected.json, or compare with it (`--check`); `make test-trl`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

HERE = Path(__file__).parent
TALKS = json.loads((HERE / "conversations.json").read_text())
SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
]


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # As of Llama 3. GPT-2's cuts spaces before a word otherwise than at the end of a text, and TRL, which compares the
    # tokens of the prompt alone with those of the whole, then takes the end of the prompt for an answer.
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    cut = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [json.dumps(TALKS, ensure_ascii=False)] * 3 + ["\n\n system user assistant"] * 9, trainer
    )
    return tokenizer


def template(name: str) -> str:
    return (HERE / "templates" / f"{name}.jinja").read_text()


def load(name: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    made.chat_template = template(name)
    return made


def tiny() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=420, n_positions=512, n_embd=8, n_layer=1, n_head=1))


SETTINGS = {"max_length": None, "report_to": "none", "use_cpu": True, "bf16": False}


def sft(name: str, rows: list[dict], **settings) -> dict[str, list]:
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(output_dir=folder, eos_token="</s>", **SETTINGS, **settings)
        trainer = SFTTrainer(tiny(), config, train_dataset=Dataset.from_list(rows), processing_class=load(name))
        rows = [trainer.train_dataset[i] for i in range(len(rows))]
        batch = trainer.data_collator(
            [{key: row[key] for key in ("input_ids", "labels") if key in row} for row in rows]
        )
    return {key: batch[key].tolist() for key in ("input_ids", "labels", "attention_mask")}


def dpo(name: str, rows: list[dict]) -> dict[str, list]:
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(output_dir=folder, **SETTINGS)
        trainer = DPOTrainer(
            tiny(), tiny(), args=config, train_dataset=Dataset.from_list(rows), processing_class=load(name)
        )
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    return {key: batch[key].tolist() for key in ("input_ids", "attention_mask", "completion_mask")}


def make() -> dict[str, object]:
    plain, system = TALKS["plain"], TALKS["system"]
    tools = {"tools": json.dumps(TALKS["tool_schemas"])}
    found: dict[str, object] = {}
    for name, talks in {
        "gemma_training": plain,
        "llama3_training": [*plain, *system],
        "phi3_training": [*plain, *system],
        "qwen2_5_training": [*plain, *system],
    }.items():
        found[f"assistant {name}"] = sft(name, [{"messages": talk} for talk in talks], assistant_only_loss=True)
    with_tools = [{"messages": talk, **tools} for talk in TALKS["tools"]]
    found["assistant tools qwen2_5_training"] = sft("qwen2_5_training", with_tools, assistant_only_loss=True)
    for name, talks in {
        "chatml": [*plain, *system],
        "gemma": plain,
        "llama3": [*plain, *system],
        "mistral": plain,
        "phi3": [*plain, *system],
        "qwen2_5": [*plain, *system],
        "qwen3": [*plain, *system],
    }.items():
        rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in talks]
        found[f"last {name}"] = sft(name, rows)
        found[f"all {name}"] = sft(name, [{"messages": talk} for talk in talks])
        pairs = [
            {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": [{"role": "assistant", "content": f"No {i}"}]}
            for i, talk in enumerate(talks)
            if not talk[-1]["content"].startswith("\n")  # joined with the prompt, which TRL then cuts for both answers
        ]
        found[f"preference {name}"] = dpo(name, pairs)
    flat = found["assistant llama3_training"]
    rows = [
        {
            key: [v for v, kept in zip(flat[key][i], flat["attention_mask"][i], strict=True) if kept]
            for key in ("input_ids", "labels")
        }
        for i in range(len(flat["input_ids"]))
    ]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    found["flat"] = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in batch.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if not check:
        train().save(str(HERE / "tokenizer.json"))
    found = json.loads(json.dumps(make()))
    path = HERE / "expected.json"
    if check:
        expected = json.loads(path.read_text())
        wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        sys.stdout.write(f"{len(found)} cases of TRL, {len(wrong)} differ from {path}: {wrong}\n")
        return bool(wrong)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
