"""Prints the seconds that TRL takes for its preparation of conversations and a first epoch of packed rows.

This runs in an environment with TRL; `benchmarks.chat` starts it.
"""

import json
import sys
import tempfile
import time

from datasets import load_dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def main(path: str, tokenizer: str, template: str, row: int, workers: int) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8000, n_positions=row, n_embd=8, n_layer=1, n_head=1))
    model.config._attn_implementation = "flash_attention_2"  # without which TRL warns that rows are mixed
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "packing": True,
            "max_length": row,
            "assistant_only_loss": True,
            "per_device_train_batch_size": 4,
            "dataset_num_proc": workers or None,
            "dataloader_num_workers": workers,
            "eos_token": "<|im_end|>",
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
        }
        conversations = load_dataset("json", data_files=path, split="train", cache_dir=folder)
        tokens = PreTrainedTokenizerFast(
            tokenizer_file=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template
        )
        begun = time.perf_counter()
        config = SFTConfig(output_dir=folder, **settings)
        trainer = SFTTrainer(model, config, train_dataset=conversations, processing_class=tokens)
        prepared = time.perf_counter()
        rows = sum(len(batch["input_ids"]) for batch in trainer.get_train_dataloader())
        print(json.dumps({"prepare": prepared - begun, "epoch": time.perf_counter() - prepared, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
