"""Train a small language model on characters with state that batches carry on, and without.

The text is the docstrings of Python's standard library, one document a module. Both models are the same GRU with the
same weights at the start; both see the same chunks of a few characters, as many steps, by truncated back-propagation.
Only the order differs: with ``mode="split"`` a row of a batch continues where it stood in the batch before, and the
state is carried on until a document ends; with ``mode="shuffled"`` each chunk begins with a state of zeros.

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
from dataload.sources.tokens.reader import TokenSource
from dataload.streams import StreamSampler, reset_state
from dataload.torch import to_tensors

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = 128  # ASCII
HELD_OUT = 25  # every 25th module is kept for the test

Mode = Literal["split", "shuffled"]
NAMES: dict[Mode, str] = {"split": "carried", "shuffled": "zero at each chunk"}


def docstrings(pattern: str) -> Iterator[str]:
    """The docstrings of each module of the standard library that has any, as one text."""
    library = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(library.glob(pattern)):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(library).parts):
            continue
        with suppress(SyntaxError, ValueError):  # a few files there are wrong on purpose
            nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
            texts = [text for node in nodes if (text := ast.get_docstring(node))]
            if texts:
                yield "\n\n".join(texts) + "\n"


def prepare(folder: Path, pattern: str) -> None:
    """Write the characters as flat files of uint16, and beside them where documents start; unless they are there."""
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
    """Records of `length` characters and the one that follows, within documents."""
    starts = folder / f"{name}_starts.npy"
    return TokenSource(folder / f"{name}.npy", window=length + 1, documents=starts, ends="drop")


def load(source: TokenSource, rows: int, mode: Mode, seed: int = 0, **options: Any) -> dataload.Loader[Any]:
    order = StreamSampler(sequence_lengths=source.sequence_lengths, rows=rows, mode=mode, seed=seed)
    return dataload.Loader(source, batch_sampler=order, batch_transform=to_tensors, **options)


class CharacterModel(nn.Module):
    """The logits of the next character at each place, and the state behind the last."""

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
    """(rows, characters) losses in nats, and the state for the next batch.

    The same for both orders: of shuffled chunks all are first, so that the state is never carried.
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
            state = last.detach()  # the truncation: gradients do not flow into earlier batches
    return model


@torch.no_grad()
def bits_per_character(model: CharacterModel, source: TokenSource, mode: Mode) -> float:
    """The loss over all chunks of the source, each once: the same characters in both modes."""
    total = count = 0.0
    state = None
    with load(source, rows=64, mode=mode) as loader:
        for batch in loader:
            losses, state = losses_of(model, batch, state)
            valid = batch["valid"]
            total += losses[valid].sum().item()
            count += losses[valid].numel()
    return total / count / np.log(2)


def resumes(source: TokenSource, rows: int, step: int) -> bool:
    """Whether another loader, with workers, goes on with the same batch after so many steps.

    Of a training, a checkpoint holds this state beside those of the model, the optimizer and the GRU.
    """
    with load(source, rows, "split") as loader, load(source, rows, "split", num_workers=2) as other:
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        other.load_state_dict(loader.state_dict())
        expected, found = next(batches), next(iter(other))
    return expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def draw(source: TokenSource, rows: int, path: str) -> None:
    from dataload.analysis.pictures import stream_figure  # matplotlib is for this alone
    from dataload.samplers.streams.report import stream_report

    order = StreamSampler(sequence_lengths=source.sequence_lengths, rows=rows)
    stream_figure(order, stream_report(order), "Which document each row of char_lm.py follows").savefig(path)


def show(console: Console, bits: dict[tuple[Mode, Mode], list[float]], arguments: argparse.Namespace) -> bool:
    """Print the table; whether the carried state is better with each seed."""
    table = Table(title=f"Bits per character of held-out text, chunks of {arguments.length} characters")
    table.add_column("state in training")
    for column in ("steps", "tested: carried", "tested: zero at each chunk"):
        table.add_column(column, justify="right")
    for mode, name in NAMES.items():
        cells = [bits[mode, test] for test in NAMES]
        shown = (f"{np.mean(cell):.3f} ({min(cell):.3f} to {max(cell):.3f})" for cell in cells)
        table.add_row(name, str(arguments.steps), *shown)
    console.print(table)
    console.print(f"Seeds: {arguments.seeds}; means, and in brackets the least and the most.")
    # The other model is taken at its best: it does better with carried state, too, though it has never had any.
    carried = np.array(bits["split", "split"])
    other = np.minimum(bits["shuffled", "split"], bits["shuffled", "shuffled"])
    noise = max(np.ptp(carried), np.ptp(other))
    console.print(
        f"Training with carried state saves {np.mean(other - carried):.3f} bits per character, "
        f"however the other model is tested; seeds differ by up to {noise:.3f}."
    )
    better = bool(carried.max() < other.min())
    if not better:
        console.print("[red]the seeds overlap; carried state should be better with each[/red]")
    return better


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="of training, each")
    parser.add_argument("--seeds", type=int, default=3, help="how often both are trained")
    parser.add_argument("--length", type=int, default=8, help="characters of a chunk, and of back-propagation")
    parser.add_argument("--rows", type=int, default=128, help="of a batch")
    parser.add_argument("--hidden", type=int, default=64, help="size of the state")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate of Adam")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "docstrings", help="where the text is kept")
    parser.add_argument("--pattern", default="**/*.py", help="files of the standard library to take")
    parser.add_argument("--picture", help="draw which document each row follows: a .png, .svg or .pdf")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a model this small is no faster on several, and far slower on a busy machine
    console = Console()

    prepare(arguments.data, arguments.pattern)
    source, test = (chunks(arguments.data, name, arguments.length) for name in ("train", "test"))
    if arguments.picture:
        draw(source, arguments.rows, arguments.picture)
    same = resumes(source, arguments.rows, step=7)
    console.print(f"A loader resumed after step 7, with two workers, goes on with the same batch: {same}")

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
