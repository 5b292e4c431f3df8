"""Windows of a token file, beside numpy, torch's DataLoader and nanoGPT's loop."""

from contextlib import ExitStack

import numpy as np

from benchmarks.harness import Case, against, batches, loaders, made_tokens, more_workers, run_cases, torch_loaders
from dataload.sources.tokens.reader import TokenSource

T = 1024
ROWS = 64
TOKENS = 50_000_000


def tokens():
    path = made_tokens("tokens.npy", np.resize(np.random.default_rng(0).integers(0, 50_304, 10**6, np.uint16), TOKENS))
    source = TokenSource(path, window=T + 1)
    plan = [rows for rows in batches(len(source), ROWS) if len(rows) == ROWS]
    stored = np.load(path, mmap_mode="r")
    # Items that overlap: the fastest way to index windows in numpy, before sliding_window_view and np.stack.
    windows = np.ndarray((len(source),), np.dtype((np.void, 2 * T + 2)), stored, 0, (2 * T,))

    def gather():
        return ({"tokens": windows[rows].view(np.uint16).reshape(-1, T + 1)} for rows in plan)

    def stack():
        return ({"tokens": np.stack([stored[i * T : i * T + T + 1] for i in rows.tolist()])} for rows in plan)

    with ExitStack() as held:
        cases = [
            Case("numpy gather of the mapped file (the limit)", gather),
            Case("np.stack of slices of the memmap", stack),
            Case("source.read_batch", lambda: map(source.read_batch, plan)),
            *loaders(held, source, ROWS, range(3), {0: 0.8, 1: 0.8, 2: 0.8}),
        ]
        rows = run_cases(f"Token windows, {ROWS} rows of {T} + 1 uint16", cases)
    return [*rows, more_workers(rows[3:]), *documents(path), *beside_torch(source, stored)]


def documents(path):
    """Windows that follow documents of half to four times their length."""
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.integers(T // 2, 4 * T, TOKENS // T))
    starts = np.concatenate([[0], starts[starts < TOKENS]])
    cases = []
    for ends in ("across", "drop", "pad"):
        source = TokenSource(path, window=T + 1, ends=ends, documents=None if ends == "across" else starts)

        def epoch(source=source, plan=batches(len(source), ROWS)):  # noqa: B008 - bound to this source on purpose
            return map(source.read_batch, plan)

        cases.append(Case(f'source.read_batch, ends="{ends}"', epoch))
    return run_cases("Token windows that follow documents", cases, same=None)


def to_xy(batch):
    """Inputs and targets as torch's embeddings and losses take them."""
    import torch

    tokens = torch.from_numpy(batch["tokens"].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


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


def beside_torch(source, stored):
    """Inputs and targets as int64 tensors, as nanoGPT's training loop takes them."""
    theirs = [*torch_loaders(lambda _: Windows(stored), ROWS)]
    if not theirs:
        return []

    def get_batch():
        import torch

        for _ in range(len(source) // ROWS):
            starts = torch.randint(len(stored) - T, (ROWS,)).tolist()
            yield tuple(
                torch.stack([torch.from_numpy(stored[i + by : i + by + T].astype(np.int64)) for i in starts])
                for by in (0, 1)
            )

    with ExitStack() as held:
        ours = [*loaders(held, source, ROWS, range(3), {}, batch_transform=to_xy)]
        as_stored = [*loaders(held, source, ROWS, (1,), {})]
        cases = [*theirs, Case("nanoGPT's get_batch, no loader", get_batch), *ours]
        cases.append(Case("Loader, 1 worker, uint16 as stored", as_stored[0].epoch))
        title = f"Token windows as int64 tensors x and y, {ROWS} rows of {T}"
        rows = run_cases(title, cases, same=None, rows=lambda _: ROWS)
    best = max(rows[:2], key=lambda row: row["records_per_second"])
    fastest = max(rows[3:6], key=lambda row: row["records_per_second"])
    return [*rows, against(fastest, best, 5), against(rows[6], best, 5)]
