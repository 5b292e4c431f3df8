"""Token windows of a flat file: the bare gather, ours, and torch's DataLoader over the usual Dataset."""

import shutil

import numpy as np

from benchmarks.cases import SEED, consume, through_loader
from benchmarks.datasets import ROOT, VERSION
from benchmarks.timing import Case, compare
from dataload.samplers import GlobalShuffle
from dataload.sources.tokens.reader import TokenSource

T = 1024
ROWS = 64
TOKENS = 50_000_000


def flat_file():
    """The path of a raw file of uint16, written on first use."""
    path = ROOT / f"v{VERSION}-{TOKENS}.bin"
    if not path.exists():
        ROOT.mkdir(exist_ok=True)
        if shutil.disk_usage(ROOT).free < 4 << 30:
            raise SystemExit(f"the benchmark needs 4 GiB in {ROOT}; set TMPDIR to another place")
        unfinished = path.with_suffix(".unfinished")
        np.random.default_rng(0).integers(0, 50_257, TOKENS, np.uint16).tofile(unfinished)
        unfinished.rename(path)
    return str(path)


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
    path = flat_file()
    source = TokenSource(path, window=T + 1)
    count = len(source)
    order = GlobalShuffle(count, SEED).indices(np.arange(count), epoch=0)
    plan = [order[start : start + ROWS] for start in range(0, count, ROWS)]
    stored = np.memmap(path, np.uint16, "r")
    # Items that overlap: of all ways to index windows in numpy the fastest, ahead of sliding_window_view and np.stack.
    windows = np.ndarray((count,), np.dtype((np.void, 2 * T + 2)), stored, 0, (2 * T,))

    def gather():
        batches = ({"tokens": windows[rows].view(np.uint16).reshape(-1, T + 1)} for rows in plan)
        return consume(batches, first_tokens)

    def stack():
        batches = ({"tokens": np.stack([stored[i * T : i * T + T + 1] for i in rows.tolist()])} for rows in plan)
        return consume(batches, first_tokens)

    size = {"items": count, "steps": len(plan)}
    rows = compare(
        f"Token windows, {ROWS} rows of {T} + 1 uint16",
        [
            Case("numpy gather of the mapped file (the limit)", gather),
            Case("np.stack of slices of the memmap", stack),
            Case("source.read_batch", lambda: consume(map(source.read_batch, plan), first_tokens)),
            Case("Loader, no worker", through_loader(source, ROWS, 0, first_tokens)),
            Case("Loader, 1 worker", through_loader(source, ROWS, 1, first_tokens), 0.8),
            Case("Loader, 2 workers", through_loader(source, ROWS, 2, first_tokens), 0.8),
        ],
        **size,
    )
    return rows + documents(path, size) + peers(path, source, size)


def documents(path, size):
    """What following documents costs: half as long as a window and twice as long, in no order."""
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.integers(T // 2, 4 * T, TOKENS // T))
    starts = np.concatenate([[0], starts[starts < TOKENS]])
    cases = []
    for ends in ("across", "drop", "pad"):
        found = None if ends == "across" else starts
        source = TokenSource(path, window=T + 1, ends=ends, documents=found)
        order = GlobalShuffle(len(source), SEED).indices(np.arange(len(source)), epoch=0)
        plan = [order[start : start + ROWS] for start in range(0, len(order), ROWS)]

        def run(source=source, plan=plan):
            return consume(map(source.read_batch, plan), first_tokens)

        cases.append(Case(f'source.read_batch, ends="{ends}"', run, items=len(source)))
    return compare("Token windows that follow documents", cases, **size)


def peers(path, source, size):
    """Inputs and targets as int64 tensors, as nanoGPT's training loop takes them."""
    try:
        import torch
        from torch.utils.data import DataLoader
    except ImportError:
        print("torch is not installed: no peer")
        return []
    from benchmarks.token_dataset import Windows

    ours = [
        Case(
            f"Loader, {workers} workers, to int64 tensors",
            through_loader(source, ROWS, workers, first_inputs, batch_transform=to_xy),
        )
        for workers in (0, 1, 2)
    ]
    theirs = []
    for workers in (0, 1, 2):
        loader = DataLoader(
            Windows(path, T), batch_size=ROWS, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        theirs.append(Case(f"torch DataLoader, {workers} workers", lambda loader=loader: consume(loader, first_inputs)))
    stored = np.memmap(path, np.uint16, "r")

    def get_batch():
        total = 0.0
        for _ in range(size["steps"]):
            starts = torch.randint(len(stored) - T, (ROWS,)).tolist()
            x = torch.stack([torch.from_numpy(stored[i : i + T].astype(np.int64)) for i in starts])
            y = torch.stack([torch.from_numpy(stored[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
            total += first_inputs((x, y))

    title = f"Token windows as int64 tensors x and y, {ROWS} rows of {T}"
    rows = compare(title, [*theirs, Case("nanoGPT's get_batch, no loader", get_batch), *ours], rounds=3, **size)
    rate = {row["case"]: row["records_per_second"] for row in rows}
    best = max(theirs, key=lambda case: rate[case.name])
    tensors = max(ours, key=lambda case: rate[case.name])
    as_stored = [
        Case(f"Loader, {workers} workers, uint16 as stored", through_loader(source, ROWS, workers, first_tokens), 5)
        for workers in (1, 2)
    ]
    aimed = Case(tensors.name, tensors.run, 5)
    return rows + compare("The same beside torch's best", [best, aimed, *as_stored], rounds=5, **size)
