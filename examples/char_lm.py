"""Train a small character-level language model with and without state that is carried from batch to batch.

The text is the docstrings of Python's standard library, with one document per module. Both models are the same GRU and
start with the same weights. Both train on the same chunks of a few characters for the same number of steps, with
truncated back-propagation through time. Only the order differs: with ``mode="split"``, each row of a batch continues
the row of the previous batch, and the state is carried until the document ends. With ``mode="shuffled"``, each chunk
starts with a state of zeros.

python examples/char_lm.py
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import dataload
from dataload.sources import TokenSource
from dataload.streams import StreamSampler, reset_state
from dataload.torch import to_tensors

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = 128  # ASCII
HELD_OUT = 25  # every 25th module is test data

Mode = Literal["split", "shuffled"]
NAMES: dict[Mode, str] = {"split": "carried", "shuffled": "zero at each chunk"}


def docstrings(pattern: str) -> Iterator[str]:
    """Yield one text per module of the standard library: all its docstrings."""
    library = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(library.glob(pattern)):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(library).parts):
            continue
        with suppress(SyntaxError, ValueError):  # a few files are invalid on purpose
            nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
            texts = [text for node in nodes if (text := ast.get_docstring(node))]
            if texts:
                yield "\n\n".join(texts) + "\n"


def prepare(folder: Path, pattern: str) -> None:
    """Write flat uint16 files of characters, and the positions at which documents start, unless they exist."""
    if (folder / "test_starts.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = [np.frombuffer(text.encode("ascii", "replace"), np.uint8) for text in docstrings(pattern)]
    test = documents[::HELD_OUT]
    train = [document for i, document in enumerate(documents) if i % HELD_OUT]
    for name, part in (("train", train), ("test", test)):
        np.save(folder / f"{name}.npy", np.concatenate(part).astype(np.uint16))
        np.save(folder / f"{name}_starts.npy", np.cumsum([0, *map(len, part)]))


def chunks(folder: Path, name: str, length: int) -> TokenSource:
    """Return a source of records of ``length + 1`` characters that do not cross documents."""
    starts = folder / f"{name}_starts.npy"
    return TokenSource(folder / f"{name}.npy", window=length + 1, documents=starts, ends="drop")


def load(source: TokenSource, rows: int, mode: Mode, seed: int = 0, **options: Any) -> dataload.Loader[Any]:
    order = StreamSampler(sequence_lengths=source.sequence_lengths, rows=rows, mode=mode, seed=seed)
    return dataload.Loader(source, sampler=order, batch_transform=to_tensors, **options)


class CharacterModel(nn.Module):
    """A GRU that returns the logits of each next character, and its final state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, CHARACTERS)

    def forward(self, characters: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, last = self.gru(self.embed(characters), state)
        return self.head(outputs), last


def losses_of(
    model: CharacterModel, batch: dict[str, torch.Tensor], state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses in nats, (rows, characters), and the state for the next batch.

    This works for both orders: shuffled chunks are all marked as first, so their state is never carried.
    """
    characters = batch["tokens"].long()
    logits, last = model(characters[:, :-1], reset_state(state, batch["is_first"], axis=1))
    losses = functional.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten(), reduction="none")
    return losses.view(len(characters), -1), last


def train(source: TokenSource, mode: Mode, seed: int, arguments: argparse.Namespace) -> CharacterModel:
    torch.manual_seed(seed)
    model = CharacterModel(arguments.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.rate)
    state = None
    with load(source, arguments.rows, mode, seed, tail="drop") as loader:
        epochs = chain.from_iterable(repeat(loader))
        for batch in islice(epochs, arguments.steps):
            losses, last = losses_of(model, batch, state)
            optimizer.zero_grad()
            losses.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state = last.detach()  # truncation: gradients do not flow into earlier batches
    return model


@torch.no_grad()
def bits_per_character(model: CharacterModel, source: TokenSource, mode: Mode) -> float:
    """Return the loss over all chunks of the source, which are the same characters in both modes."""
    total = count = 0.0
    state = None
    with load(source, rows=64, mode=mode) as loader:
        for batch in loader:
            losses, state = losses_of(model, batch, state)
            valid = batch["valid"]
            total += losses[valid].sum().item()
            count += losses[valid].numel()
    return float(total / count / np.log(2))


def resumes(source: TokenSource, rows: int, step: int) -> bool:
    """Return whether another loader, with workers, continues with the same batch after `step` steps.

    A training checkpoint would hold this state together with those of the model, the optimizer and the GRU.
    """
    with load(source, rows, "split") as loader, load(source, rows, "split", num_workers=2) as other:
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        other.load_state_dict(loader.state_dict())
        expected, found = next(batches), next(iter(other))
    return expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def draw(source: TokenSource, rows: int, path: str) -> None:
    from dataload.analysis.pictures import stream_figure  # only this needs matplotlib
    from dataload.samplers.streams.report import stream_report

    order = StreamSampler(sequence_lengths=source.sequence_lengths, rows=rows)
    stream_figure(order, stream_report(order), "The document that each row of char_lm.py follows").savefig(path)


def show(console: Console, bits: dict[tuple[Mode, Mode], list[float]], arguments: argparse.Namespace) -> bool:
    """Print the results, and return whether carried state is better for every seed."""
    table = Table(title=f"Bits per character of held-out text, chunks of {arguments.length} characters")
    table.add_column("state in training")
    for column in ("steps", "tested: carried", "tested: zero at each chunk"):
        table.add_column(column, justify="right")
    for mode, name in NAMES.items():
        cells = [bits[mode, test] for test in NAMES]
        shown = (f"{np.mean(cell):.3f} ({min(cell):.3f} to {max(cell):.3f})" for cell in cells)
        table.add_row(name, str(arguments.steps), *shown)
    console.print(table)
    console.print(f"Means over {arguments.seeds} seeds, with the lowest and highest values in brackets.")
    # Compare with the other model at its best. It is also better with carried state, although it never trained with it.
    carried = np.array(bits["split", "split"])
    other = np.minimum(bits["shuffled", "split"], bits["shuffled", "shuffled"])
    noise = max(np.ptp(carried), np.ptp(other))
    console.print(
        f"Training with carried state saves {np.mean(other - carried):.3f} bits per character, compared with the other "
        f"model's better result; seeds differ by up to {noise:.3f}."
    )
    better = bool(carried.max() < other.min())
    if not better:
        console.print("[red]results overlap between seeds; carried state should be better for every seed[/red]")
    return better


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps of each model")
    parser.add_argument("--seeds", type=int, default=3, help="number of times to train both models")
    parser.add_argument("--length", type=int, default=8, help="characters per chunk, and per back-propagation")
    parser.add_argument("--rows", type=int, default=128, help="rows per batch")
    parser.add_argument("--hidden", type=int, default=64, help="size of the state")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate of Adam")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "docstrings", help="directory for the text")
    parser.add_argument("--pattern", default="**/*.py", help="files of the standard library to use")
    parser.add_argument(
        "--picture", help="file for a picture of the document that each row follows: .png, .svg or .pdf"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not speed up so small a model
    console = Console()

    prepare(arguments.data, arguments.pattern)
    source, test = (chunks(arguments.data, name, arguments.length) for name in ("train", "test"))
    if arguments.picture:
        draw(source, arguments.rows, arguments.picture)
    same = resumes(source, arguments.rows, step=7)
    console.print(f"A loader resumed after step 7, with two workers, continues with the same batch: {same}")

    bits: dict[tuple[Mode, Mode], list[float]] = {}
    for seed in range(arguments.seeds):
        for mode in NAMES:
            console.print(f"Training with seed {seed}, state {NAMES[mode]} ...")
            model = train(source, mode, seed, arguments)
            for tested in NAMES:
                bits.setdefault((mode, tested), []).append(bits_per_character(model, test, tested))
    better = show(console, bits, arguments)
    return 0 if same and better else 1


if __name__ == "__main__":
    sys.exit(main())
