"""Batches copied ahead to a device: on one that is simulated, on the CPU, and on a GPU where there is one."""

import contextlib
import gc
import json
import signal
import weakref
from collections import deque

import numpy as np
import pytest

from dataload import ConfigError, Loader, MemorySource, RangeSource, WorkerError, mix
from dataload.errors import ClosedSourceError

torch = pytest.importorskip("torch")

from dataload.torch import DeviceLoader, to_pinned  # noqa: E402 - skipped where torch is missing

DEVICE = torch.device("privateuseone", 0)
STEPS = 9


class Stream:
    """Work in its order: at once where the device is quick, else when somebody waits for it."""

    def __init__(self, quick):
        self.work, self.done, self.quick = [], 0, quick

    def queue(self, operation):
        self.work.append(operation)
        if self.quick:
            self.run()

    def run(self, until=None):
        until = len(self.work) if until is None else until
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()

    def record_event(self):
        return self, len(self.work)

    def wait_event(self, event):
        stream, until = event
        self.queue(lambda: stream.run(until))


class Block:
    """Memory of the device; belongs to the stream that it was allocated on."""

    def __init__(self, stream, shape):
        self.stream, self.data = stream, np.full(shape, -1.0)
        self.used_on, self.awaited = set(), []

    def is_free_for(self, stream, shape):
        done = all(other.done >= until for other, until in self.awaited)
        return self.stream is stream and self.data.shape == shape and done


class OnDevice(torch.Tensor):
    def record_stream(self, stream):
        self.block.used_on.add(stream)


class OnHost(torch.Tensor):
    pins = False

    def is_pinned(self):
        return self.pins

    def pin_memory(self):
        self.simulated.pinned += 1
        return self.simulated.host(self.numpy().copy(), pinned=True)

    def to(self, device, *, non_blocking):
        assert (device, non_blocking) == (DEVICE, True)
        return self.simulated.copy(self.numpy(), waits=not self.pins)


class Simulated:
    """What `torch.cuda` is for a GPU, with memory that is used again as soon as that is allowed.

    Its main stream is always late: nothing on it happens before somebody looks at a result. Its other streams are
    quick or late, the two extremes of what a device may do.
    """

    def __init__(self, quick):
        self.quick = quick
        self.main = self.current = Stream(quick=False)
        self.streams = []
        self.blocks, self.free = [], deque()
        self.copies = self.host_waits = self.pinned = 0

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def Stream(self, device):
        assert device == DEVICE
        self.streams.append(Stream(self.quick))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device):
        assert device == DEVICE
        return self.current

    def host(self, array, *, pinned=False):
        tensor = torch.from_numpy(array).as_subclass(OnHost)
        tensor.simulated, tensor.pins = self, pinned
        return tensor

    def copy(self, source, *, waits):
        assert self.current in self.streams, "a copy waits for the consumer's kernels"
        self.copies += 1
        block = self.allocate(source.shape)
        self.current.queue(lambda: np.copyto(block.data, source))
        if waits:
            self.host_waits += 1
            self.current.run()
        tensor = torch.empty(source.shape).as_subclass(OnDevice)
        tensor.block = block
        weakref.finalize(tensor, self.give_back, block)
        return tensor

    def allocate(self, shape):
        for block in list(self.free):
            if block.is_free_for(self.current, shape):
                self.free.remove(block)
                return block
        self.blocks.append(Block(self.current, shape))
        return self.blocks[-1]

    def give_back(self, block):
        block.awaited = [(stream, len(stream.work)) for stream in block.used_on]
        block.used_on = set()
        self.free.appendleft(block)

    def kernel(self, tensor):
        """Reads a tensor on the current stream; what it read is there when the stream has run."""
        read, data = [], tensor.block.data
        self.current.queue(lambda: read.append(data.copy()))
        return read


@pytest.fixture(params=["quick", "late"])
def device(request, monkeypatch):
    simulated = Simulated(request.param == "quick")
    monkeypatch.setattr(torch, "privateuseone", simulated, raising=False)
    return simulated


VALUES = np.arange(STEPS * 4 * 3, dtype=np.float64).reshape(STEPS * 4, 3)


def host_loader(device, *, pinned=False, **settings):
    def to_host(batch):
        host = device.host(batch["x"], pinned=pinned)
        return {"x": host, "nested": ([device.host(batch["x"] + 0.5, pinned=pinned)], "text", ["a", "b"]), "n": 3}

    return Loader(MemorySource({"x": VALUES}), batch_size=4, batch_transform=to_host, **settings)


@pytest.mark.parametrize("depth", [1, 3])
def test_kernels_see_their_own_batch_whatever_the_device_does_first(device, depth):
    with DeviceLoader(host_loader(device), "privateuseone", depth=depth) as loader:
        assert loader.device == DEVICE
        read = []
        for batch in loader:
            assert (batch["nested"][1:], batch["n"]) == (("text", ["a", "b"]), 3)
            assert isinstance(batch["x"], OnDevice)
            read += [device.kernel(batch["x"]), device.kernel(batch["nested"][0][0])]
            del batch
            gc.collect(0)
    assert read == [[]] * 2 * STEPS, "handing over waited for the consumer's stream"
    device.main.run()
    found = np.array([values for (values,) in read]).reshape(STEPS, 2, 4, 3)
    assert np.array_equal(found[:, 0], VALUES.reshape(STEPS, 4, 3))
    assert np.array_equal(found[:, 1], VALUES.reshape(STEPS, 4, 3) + 0.5)


@pytest.mark.parametrize(("pinned", "pin"), [(False, True), (True, True), (True, False), (False, False)])
def test_the_host_waits_only_for_memory_that_is_not_pinned(device, pinned, pin):
    with DeviceLoader(host_loader(device, pinned=pinned), DEVICE, pin=pin) as loader:
        for _ in loader:
            pass
    assert device.pinned == (2 * STEPS if pin and not pinned else 0), "what is pinned is not pinned again"
    assert device.host_waits == (0 if pin or pinned else 2 * STEPS)


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_so_many_batches_are_ahead(device, depth):
    with DeviceLoader(host_loader(device), DEVICE, depth=depth) as loader:
        assert device.copies == 0
        for step, _ in enumerate(loader):
            assert device.copies == 2 * min(step + 1 + depth, STEPS)


def test_the_state_counts_what_was_handed_over(device):
    settings = {"shuffle": True, "seed": 3}
    plain = host_loader(device, **settings)
    expected = [plain.state_dict(), *(plain.state_dict() for _ in plain)]

    def served(loader, steps=None):
        found = []
        for batch in loader:
            found.append(device.kernel(batch["x"]))
            if len(found) == steps:
                break
        device.main.run()
        return [values[0].tolist() for values in found]

    whole = served(DeviceLoader(host_loader(device, **settings), DEVICE))
    for steps in range(1, STEPS + 1):
        loader = DeviceLoader(host_loader(device, **settings), DEVICE)
        assert loader.state_dict() == expected[0]
        assert served(loader, steps) == whole[:steps]
        assert loader.state_dict() == expected[steps]
        if steps == STEPS:
            break
        state = json.loads(json.dumps(loader.state_dict()))
        loader.state_dict().clear()  # a state belongs to whoever took it
        loader.load_state_dict(state)  # into the same one, whose loader is ahead
        assert loader.state_dict() == expected[steps]
        assert served(loader) == whole[steps:]
        other = DeviceLoader(host_loader(device, num_workers=1, **settings), DEVICE, depth=1)
        other.load_state_dict(state)
        assert served(other) == whole[steps:]
        other.close()


def test_epochs_count_on_as_those_of_the_loader(device):
    def run(loader):
        """State, epoch and step after each of some moves, and within a `for`."""
        seen = []

        def note():
            state = loader.state_dict()
            seen.append((state["epoch"], state["position"], loader.epoch, loader.step))

        for stop in (3, STEPS - 1, STEPS, None):
            for step, _ in enumerate(loader, 1):
                note()
                if step == stop:
                    break
            note()
        for epoch in (4, 4, 7):
            loader.set_epoch(epoch)
            note()
        next(iter(loader))
        note()
        loader.set_epoch(8)  # the next one in any case: changes nothing
        note()
        loader.set_epoch(7)
        note()
        loader.load_state_dict({**loader.state_dict(), "position": 8})
        loader.set_epoch(7)  # its position stays
        note()
        for step, _ in enumerate(loader):
            if step == 5:
                loader.set_epoch(20)  # the one that is under way goes on
            note()
        note()
        several = [iter(loader) for _ in range(2)]  # the second begins while the first is at a step
        for batches in several:
            next(batches)
            note()
        assert len(loader) == STEPS
        return seen

    assert run(DeviceLoader(host_loader(device), DEVICE)) == run(host_loader(device))


def failing(sample, context):
    if context.index == 22:
        raise ValueError("no such luck")
    return sample


def test_an_error_comes_after_the_batches_before_it(device, monkeypatch):
    loader = DeviceLoader(host_loader(device, transform=failing), DEVICE, depth=3)
    received = []
    with pytest.raises(WorkerError) as caught:
        received.extend(loader)
    assert (len(received), caught.value.step) == (5, 5)
    assert loader.state_dict()["position"] == 20
    monkeypatch.setattr(loader, "_receive", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert loader.state_dict()["position"] == 20, "a batch that is not handed over does not count"


def test_there_is_one_iteration_at_a_time(device):
    loader = DeviceLoader(host_loader(device), DEVICE, depth=2)
    for end in (lambda: next(iter(loader)), lambda: loader.load_state_dict(loader.state_dict())):
        for steps in (1, STEPS - 1):  # with batches on their way, and with all of them sent
            first = iter(loader)
            for _ in range(steps):
                next(first)
            end()
            with pytest.raises(RuntimeError, match="this iteration ended when another one began"):
                next(first)
    first = iter(loader)
    next(first)
    iter(loader)  # begins with its first batch, not before
    next(first)
    state = loader.state_dict()
    assert state["position"] == 8
    loader.close()
    loader.close()
    with pytest.raises(ClosedSourceError, match="the loader is closed"):
        next(first)
    with pytest.raises(ClosedSourceError, match="the loader is closed"):
        iter(loader)
    assert loader.state_dict() == state


@pytest.mark.parametrize("after", [None, 3])
def test_ctrl_c_while_it_runs_ahead_loses_nothing(device, after):
    def interrupted(sample, context):
        if context.index == 6:
            signal.raise_signal(signal.SIGINT)
        return sample

    loader = DeviceLoader(host_loader(device, transform=interrupted), DEVICE, depth=2)
    if after is not None:
        loader.load_state_dict({**loader.state_dict(), "epoch": after})
    before = loader.state_dict()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert loader.state_dict() == before


def test_weights_change_after_the_batches_sent_ahead(device):
    parts = {name: RangeSource(60)[begin:] for name, begin in (("a", 0), ("b", 30), ("c", 50))}
    source, more = mix({"a": parts["a"], "b": parts["b"]}, {"a": 1, "b": 1}), mix(parts, {"a": 1, "b": 1, "c": 0})
    settings = {"batch_size": 4, "batch_transform": lambda batch: {"index": batch["index"].tolist()}}
    with DeviceLoader(Loader(source, **settings), DEVICE, depth=2) as loader:
        batches, served, states = iter(loader), [], []
        for step in range(9):
            if step in (2, 3):  # the second change comes before the batches sent ahead at the first are received
                for weight in (0, 3 * step):  # of two at the same step, the last counts
                    loader.change_weights({"a": 1, "b": weight})
            states.append(json.loads(json.dumps(loader.state_dict())))
            served.append(next(batches)["index"])
    of_b = (np.array(served) >= 30).sum(1).tolist()
    assert (of_b[:4], min(of_b[4:])) == ([2] * 4, 3)
    for step, state in enumerate(states[3:], 3):
        with Loader(more, **settings) as resumed:  # a source may be added
            resumed.load_state_dict(state)
            assert [batch["index"] for batch, _ in zip(resumed, served[step:], strict=False)] == served[step:], step


def test_a_for_after_the_last_epoch_leaves_the_state_at_its_end():
    with DeviceLoader(Loader(RangeSource(4), batch_size=2, epochs=1), "cpu") as loader:
        next(iter(loader))
        assert (list(loader), loader.state_dict()) == ([], loader.loader.state_dict())


def test_on_the_cpu_batches_pass_through():
    tensor = torch.arange(3)

    def transform(batch):
        return {"tensor": tensor, "array": batch["index"], "text": ["a"], "pair": (1, None)}

    with DeviceLoader(Loader(RangeSource(5), batch_size=2, batch_transform=transform), "cpu", depth=3) as loader:
        assert repr(loader) == ("DeviceLoader(Loader(5 records, 2 rows per step, epoch 0, step 0), device='cpu')")
        batches = []
        for step, batch in enumerate(loader, 1):
            assert batch["tensor"] is tensor
            assert (batch["text"], batch["pair"]) == (["a"], (1, None))
            assert loader.loader.statistics().steps == step, "something is taken ahead"
            batches.append(batch["array"])
    assert torch.equal(torch.cat(batches), torch.arange(5))


@pytest.mark.parametrize(
    ("device", "depth", "message"),
    [
        ("gpu", 2, r"torch does not know device 'gpu': Expected one of cpu, cuda"),
        (None, 2, r"torch does not know device None: "),
        ("cpu", 0, r"depth must be .*1.*, got 0"),
        ("cuda:1", 2, r"device is 'cuda:1', but torch finds none on this machine \(torch\.cuda\.is_avail"),
    ],
)
def test_devices_that_are_not_there(monkeypatch, device, depth, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        DeviceLoader(Loader(RangeSource(5), batch_size=2), device, depth=depth)
    with pytest.raises(TypeError, match="a DeviceLoader takes a Loader, found RangeSource"):
        DeviceLoader(RangeSource(5), "cpu")


def test_pinning_without_a_device_only_makes_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    array = np.arange(3)
    tensor = to_pinned({"x": array})["x"]
    assert np.shares_memory(tensor.numpy(), array)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")


@needs_gpu
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_late_kernels_see_their_own_batch(pin, workers):
    values = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    settings = {"batch_size": 4, "num_workers": workers, "batch_transform": to_pinned if workers else None}
    with DeviceLoader(Loader(MemorySource({"x": values}), **settings), "cuda", depth=2, pin=pin) as loader:
        sums = []
        for batch in loader:
            assert batch["x"].device == loader.device
            torch.cuda._sleep(2_000_000)  # the copies of the next batches overtake this one's kernels
            sums.append(batch["x"].double().sum())
            del batch
    assert torch.stack(sums).tolist() == values.reshape(16, -1).sum(1, dtype=np.float64).tolist()


@needs_gpu
def test_on_a_gpu_batches_are_pinned_and_may_be_kept():
    with Loader(RangeSource(40), batch_size=4, batch_transform=to_pinned) as host:
        assert next(iter(host))["index"].is_pinned()
    with DeviceLoader(Loader(RangeSource(40), batch_size=4), "cuda") as loader:
        kept = [batch["index"] for batch in loader]
    assert torch.equal(torch.cat(kept).cpu(), torch.arange(40))
