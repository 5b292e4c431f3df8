"""torchtitan: a dataloader component that reads with dataload and resumes on any number of ranks.

In a config of torchtitan 0.3: ``dataloader=TokenLoader.Config(dataset_path="tokens.syr")``, of records of
``seq_len + 1`` tokens. torchtitan's checkpoints include it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

import dataload
from dataload.torch import JsonState, to_tensors


class TokenLoader(BaseDataLoader):
    """Batches of tokens and the tokens that follow them, without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings of the loader."""

        seed: int = 0
        num_workers: int = 2

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> None:
        source = dataload.open(str(config.dataset_path))
        self.loader = dataload.Loader(
            source,
            batch_size=local_batch_size,
            shuffle=True,
            seed=config.seed,
            tail="drop",
            num_workers=config.num_workers,
            batch_transform=to_tensors,
            rank=dp_rank,
            world_size=dp_world_size,
        )
        self._state = JsonState(self.loader)  # a single value, as torch.distributed.checkpoint needs

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                tokens = batch["tokens"]
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state.load_state_dict(state_dict)
