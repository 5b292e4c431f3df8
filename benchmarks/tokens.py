"""Token windows of a flat file: the bare gather, ours, and torch's DataLoader over the usual Dataset."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.cases import over_format
from benchmarks.harness import ROOT, Case, batches, consume, run_cases, through_loader
from dataload.bench.data import made_data, write
from dataload.bench.workloads import get_workload
from dataload.sources.tokens.reader import TokenSource

T = 1024
ROWS = 64
TOKENS = 50_000_000


def first_tokens(batch):
    return float(batch["tokens"][:, 0].astype(np.float64).sum())


def first_inputs(batch):
    return float(batch[0][:, 0].sum())


def to_xy(batch):
    """Inputs and targets as torch's embeddings and losses take them."""
    import torch

    tokens = torch.from_numpy(batch["tokens"].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def tokens():
    path = write(made_data(get_workload("tokens"), TOKENS // T + 1), "tokens", ROOT).path
    source = TokenSource(path, window=T + 1)
    plan = batches(len(source), ROWS)
    stored = np.load(path, mmap_mode="r")
    # Items that overlap: the fastest way to index windows in numpy, before sliding_window_view and np.stack.
    windows = np.ndarray((len(source),), np.dtype((np.void, 2 * T + 2)), stored, 0, (2 * T,))

    def gather():
        found = ({"tokens": windows[rows].view(np.uint16).reshape(-1, T + 1)} for rows in plan)
        return consume(found, first_tokens)

    def stack():
        found = ({"tokens": np.stack([stored[i * T : i * T + T + 1] for i in rows.tolist()])} for rows in plan)
        return consume(found, first_tokens)

    size = {"items": len(source), "steps": len(plan)}
    limits = [
        Case("numpy gather of the mapped file (the limit)", gather),
        Case("np.stack of slices of the memmap", stack),
    ]
    title = f"Token windows, {ROWS} rows of {T} + 1 uint16"
    rows = over_format(title, limits, partial(nullcontext, source), first_tokens, plan, {0: None, 1: 0.8, 2: 0.8})
    return rows + documents(path, size) + beside_torch(source, stored, size)


def documents(path, size):
    """Windows that follow documents of half to four times their length."""
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.integers(T // 2, 4 * T, TOKENS // T))
    starts = np.concatenate([[0], starts[starts < TOKENS]])
    cases = []
    for ends in ("across", "drop", "pad"):
        source = TokenSource(path, window=T + 1, ends=ends, documents=None if ends == "across" else starts)

        def run(source=source, plan=batches(len(source), ROWS)):  # noqa: B008 - bound to this source on purpose
            return consume(map(source.read_batch, plan), first_tokens)

        cases.append(Case(f'source.read_batch, ends="{ends}"', run, items=len(source)))
    return run_cases("Token windows that follow documents", cases, **size)


class Windows:
    """The usual memmap Dataset of language models: inputs and targets of T tokens each, one after the other."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // T

    def __getitem__(self, index):
        import torch

        window = self.tokens[index * T : index * T + T + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def beside_torch(source, stored, size):
    """Inputs and targets as int64 tensors, as nanoGPT's training loop takes them."""
    try:
        import torch
        from torch.utils.data import DataLoader
    except ImportError:
        print("torch is not installed: no peer")
        return []

    theirs, ours = [], []
    for workers in (0, 1, 2):
        several = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = DataLoader(Windows(stored), batch_size=ROWS, shuffle=True, **several)
        theirs.append(Case(f"torch DataLoader, {workers} workers", partial(consume, loader, first_inputs)))
        run = through_loader(source, ROWS, workers, first_inputs, batch_transform=to_xy)
        ours.append(Case(f"Loader, {workers} workers, to int64 tensors", run))

    def get_batch():
        for _ in range(size["steps"]):
            starts = torch.randint(len(stored) - T, (ROWS,)).tolist()
            x, y = (
                torch.stack([torch.from_numpy(stored[i + by : i + by + T].astype(np.int64)) for i in starts])
                for by in (0, 1)
            )
            first_inputs((x, y))

    title = f"Token windows as int64 tensors x and y, {ROWS} rows of {T}"
    rows = run_cases(title, [*theirs, Case("nanoGPT's get_batch, no loader", get_batch), *ours], rounds=3, **size)
    rate = {row["case"]: row["records_per_second"] for row in rows}
    best, tensors = (max(cases, key=lambda case: rate[case.name]) for cases in (theirs, ours))
    as_stored = [
        Case(f"Loader, {workers} workers, uint16 as stored", through_loader(source, ROWS, workers, first_tokens), 5)
        for workers in (1, 2)
    ]
    cases = [best, replace(tensors, floor=5), *as_stored]
    return rows + run_cases("The same beside torch's best", cases, rounds=5, **size)
