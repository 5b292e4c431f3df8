"""Transforms from conversations and documents to tokens and labels, by the tokenizers of Hugging Face transformers.

```python
chat = Chat("Qwen/Qwen2.5-0.5B-Instruct")
padding = {"input_ids": Pad(0), "labels": Pad(-100), "attention_mask": Pad(0)}
loader = dataload.Loader(source, batch_size=8, transform=chat, collate=padding)
```

This is the only package that needs transformers, which is imported when a transform is built from a tokenizer's name.
"""

from dataload.text.chat import Chat, Pairs, Preference
from dataload.text.tokenizer import FillInTheMiddle, PrefixLM

__all__ = ["Chat", "FillInTheMiddle", "Pairs", "Preference", "PrefixLM"]
