"""The number of workers that a loader uses, found by trial: `search` is pure, and `Scaling` applies it.

``num_workers=N`` is an upper bound, and ``"auto"`` has a bound of its own; both are searched alike. A trial uses
another number of workers for a moment. Its time per batch is compared with that of the best number so far, in turns,
so that a machine that becomes slower does not decide. The clearer the difference, the fewer turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import sub
from statistics import median
from typing import Any, Literal, NamedTuple, Self

from dataload._util.system import usable_cpus
from dataload.executors import ExecutorName, check_executor, make_executor
from dataload.executors.base import Executor, Fleet, TimeoutPolicy
from dataload.loader.recorder import Recorder
from dataload.loader.statistics import WAITS, Workplace
from dataload.loader.step import StepWork

_QUICK_SECONDS = 5e-3  # of work per batch
_WAITING = 0.5  # fraction of their busy time: workers that use less CPU mostly wait for something else
_MOST_WAITING = 4  # times the CPUs: workers that "auto" may use if they mostly wait
_MOST_PREFETCH = 8  # batches ahead per worker that "auto" may use

_GAIN = 1.03  # speed-up that more workers must bring
_LOSS = 0.99  # speed-up that fewer workers may cost; with none, the consumer's thread must be faster
_CLEAR = 1.2  # speed-up that cannot be chance
_DOUBT = (0.3, 0.2, 0.12, 0.06, 0.0)  # by turns: results this close to the threshold take another turn
_SPREAD, _LONGEST = 0.1, 8  # samples that differ more become longer, up to `_LONGEST` times the shortest
_CHANGE, _STRAYS = 1.2, 3  # `_STRAYS` samples in a row, slower or faster by this factor, are another workload
_FIRST_PAUSE, _LAST_PAUSE = 8, 512  # samples between searches; each pause is four times as long as the last one

_UP = ("double", "more", "half", "fewer", "one", "none", "deeper")
_DOWN = ("half", "fewer", "one", "none", "double", "more", "deeper")
_AGAIN = ("double", "more", "fewer", "none", "deeper")

_SAMPLE_SECONDS, _LONG_SECONDS = 0.1, 2.0
_STEPS_PER_WORKER, _PATIENCE = 8, 64
_START_SECONDS = {"serial": 0.0, "threads": 0.0, "processes": 1.5, "ray": 3.0}  # until new workers deliver


class Setting(NamedTuple):
    """A number of workers and a depth of prefetching, chosen by the search."""

    workers: int  # 0 for the consumer's thread
    prefetch: int  # tasks ahead per worker


class Bounds(NamedTuple):
    """The settings that the search may choose."""

    least: int  # workers
    most: int
    prefetch: int  # the largest
    most_waiting: int = 0  # workers, if they mostly wait; 0 for no more than `most`


class ThroughputSample(NamedTuple):
    """The throughput of a loader for a while; see `Statistics`."""

    steps: int  # batches that the consumer received
    wait_seconds: float  # time that the consumer waited for them
    consumer_seconds: float  # time that the consumer spent in between, without pauses
    work_seconds: float  # time that all workers together spent on them
    cpu_seconds: float = 0.0
    cpu_clock_seconds: float = 0.0
    lag: float = 0.0  # how much longer the last batch was ready before it was received than the first one

    @property
    def seconds(self) -> float:
        """Length of the sample."""
        return self.wait_seconds + self.consumer_seconds

    @property
    def seconds_per_step(self) -> float:
        """Time per batch, to make one or to consume one, whichever takes longer."""
        # While the consumer uses up what was ready, it is served faster than batches are made.
        return max(self.seconds - min(0.0, self.lag), 1e-9) / max(self.steps, 1)

    @property
    def busy(self) -> float:
        """Mean number of busy workers."""
        return self.work_seconds / max(self.seconds, 1e-9)

    @property
    def mostly_waits(self) -> bool:
        """True if the CPU clock shows that the work mostly waits for something else."""
        return bool(self.cpu_clock_seconds) and self.cpu_seconds < _WAITING * self.busy * self.cpu_clock_seconds

    @property
    def is_quick(self) -> bool:
        """True if a batch takes so little work that the consumer's thread may be the fastest place."""
        return self.work_seconds <= _QUICK_SECONDS * self.steps

    def since(self, earlier: ThroughputSample) -> ThroughputSample:
        """Return the part of this sample that came after an earlier one."""
        return ThroughputSample(self.steps - earlier.steps, *map(sub, self[1:], earlier[1:]))


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a search for the best setting, which compares it with one `trial` at a time.

    `moves` names the trials to make from `best`; `failed` has the settings that were worse, and the one before `best`.
    `base` and `tried` are seconds per step with `best` and `trial`, by turn; `usual`, those since the last search, and
    how many of them the consumer waits. `strays` counts consecutive samples that are slower than that, or as a negative
    number faster ones. `pause` and `next_pause` are samples until the next search, and from it to the one after.
    `length` is the length of samples relative to the shortest ones: longer if they differ among themselves.
    """

    best: Setting
    moves: tuple[str, ...]
    trial: Setting | None = None
    on_trial: bool = False
    failed: tuple[Setting, ...] = ()
    base: tuple[float, ...] = ()
    tried: tuple[float, ...] = ()
    pause: int = 0
    next_pause: int = _FIRST_PAUSE
    usual: tuple[float, float] | None = None
    strays: int = 0
    length: int = 1

    @property
    def setting(self) -> Setting:
        return self.trial if self.on_trial and self.trial is not None else self.best


def first_search(setting: Setting, bounds: Bounds) -> Search:
    """Return a search that begins with a setting."""
    return Search(setting, _DOWN if setting.workers >= bounds.most else _UP)


def search(state: Search, sample: ThroughputSample, bounds: Bounds) -> Search:
    """Return the state after a sample of `state.setting`. Pure."""
    seconds = sample.seconds_per_step
    if state.trial is not None and not state.on_trial:
        return replace(state, on_trial=True, base=(*state.base, seconds))
    if state.trial is not None:
        tried = (*state.tried, seconds)
        return _compare(replace(state, on_trial=False, tried=tried, length=_length(state)), state.trial)
    if state.moves:
        return _try_next(state, sample, bounds)
    return _rest(state, sample, bounds)


def _compare(state: Search, trial: Setting) -> Search:
    """Return the state after a turn of the trial: it is the best, it has failed, or it takes another turn."""
    down = trial.workers < state.best.workers
    threshold = _GAIN if not down else _LOSS if trial.workers else 1.0
    doubt = 1 + _DOUBT[len(state.tried) - 1]
    gain = median(state.base) / median(state.tried)
    if gain >= threshold * doubt:
        taken = replace(state, best=trial, trial=None, failed=(state.best,))
        if gain >= _CLEAR:
            return replace(taken, moves=_DOWN if down else _UP, next_pause=_FIRST_PAUSE)
        if state.next_pause > _FIRST_PAUSE:  # small, after a pause: chance must not keep the search awake
            return taken
        return replace(taken, moves=_DOWN if down else _UP)
    if gain < threshold / doubt:
        return replace(state, trial=None, failed=(*state.failed, trial))
    return state


def _length(state: Search) -> int:
    """Return the length of samples that suits the spread of the best setting's samples."""
    if len(state.base) < 2:
        return state.length
    spread = (max(state.base) - min(state.base)) / median(state.base)
    if spread > _SPREAD:
        return min(2 * state.length, _LONGEST)
    return max(1, state.length // 2) if spread < _SPREAD / 4 else state.length


def _try_next(state: Search, sample: ThroughputSample, bounds: Bounds) -> Search:
    """Return the state with the next trial that makes sense in use, or a pause if there is none."""
    for number, move in enumerate(state.moves, start=1):
        trial = _moved(state.best, move, sample, bounds)
        if trial not in (state.best, *state.failed) and is_plausible(state.best, trial, sample):
            base = (sample.seconds_per_step,)
            return replace(state, trial=trial, on_trial=True, moves=state.moves[number:], base=base, tried=())
    pause = state.next_pause
    return replace(
        state, moves=(), failed=(), pause=pause, next_pause=min(4 * pause, _LAST_PAUSE), usual=None, strays=0
    )


def _rest(state: Search, sample: ThroughputSample, bounds: Bounds) -> Search:
    """Return the state after a sample of the pause between two searches."""
    now = (sample.seconds_per_step, sample.wait_seconds / sample.steps)
    usual = state.usual or now
    margin = (_CHANGE - 1) * usual[0]
    pairs = zip(now, usual, strict=True)
    side = next((1 if found > known else -1 for found, known in pairs if abs(found - known) > margin), 0)
    strays = state.strays + side if side * state.strays >= 0 and side else side
    if abs(strays) == _STRAYS:
        return _try_next(replace(state, moves=_UP, next_pause=_FIRST_PAUSE), sample, bounds)
    if state.pause <= 1:
        return _try_next(replace(state, moves=_AGAIN), sample, bounds)
    if not side:
        usual = (usual[0] + 0.2 * (now[0] - usual[0]), usual[1] + 0.2 * (now[1] - usual[1]))
    return replace(state, pause=state.pause - 1, usual=usual, strays=strays)


def _moved(setting: Setting, move: str, sample: ThroughputSample, bounds: Bounds) -> Setting:
    workers, prefetch = setting
    if move == "deeper":
        return Setting(workers, min(2 * prefetch, max(prefetch, bounds.prefetch)))
    quarter = max(1, workers // 4)
    wanted = {
        "double": max(2, 2 * workers),
        "more": workers + quarter,
        "half": workers // 2,
        "fewer": workers - quarter,
        "one": 1,
        "none": 0,
    }
    most = max(bounds.most, bounds.most_waiting if sample.mostly_waits else 0, workers)
    return Setting(min(most, max(bounds.least, wanted[move])), prefetch)


def is_plausible(best: Setting, trial: Setting, sample: ThroughputSample) -> bool:
    """Return True unless the sample, which is of `best`, shows that `trial` cannot be better."""
    waits = sample.wait_seconds >= WAITS * sample.seconds
    if trial.workers == best.workers:  # a longer queue helps if the workers have to wait for the consumer
        return waits and best.workers > 0 and sample.busy < 0.9 * best.workers
    if not trial.workers:
        return sample.is_quick
    return waits or trial.workers < best.workers


class Scaling:
    """Takes samples of a loader, and applies the settings that `search` chooses, of `least` to `workers` workers."""

    def __init__(
        self, workers: int | None, prefetch: int, *, least: int = 0, deepens: bool = False, cpus: int | None = None
    ) -> None:
        cpus = usable_cpus() if cpus is None else cpus
        most = cpus if workers is None else workers
        self.bounds: Bounds = Bounds(
            least=min(least, most),
            most=most,
            prefetch=max(prefetch, _MOST_PREFETCH) if deepens else prefetch,
            most_waiting=_MOST_WAITING * cpus if deepens else 0,
        )
        self._search = first_search(Setting(1 if workers is None else workers, prefetch), self.bounds)
        self._started = self._search.best.workers  # the most workers that there ever were
        self._mark = ThroughputSample(0, 0.0, 0.0, 0.0)
        self._patience = 0 if workers is None else _PATIENCE * workers  # steps until the first trial, unless quick
        self._settling = True
        self._settle_seconds: float | None = None  # None for the executor's start time
        self._due = self._settled = 1  # the steps with which to look again, and with which a new setting has settled
        self._cpu = 0.0, 0.0  # of the last sample in which the CPU clock was read

    @property
    def setting(self) -> Setting:
        return self._search.setting

    def look(self, recorder: Recorder, in_flight: Callable[[], int], use: Callable[[Setting], None]) -> None:
        """Choose another setting with `use` if a new sample is complete and says so. Call this after each batch."""
        if recorder.steps < self._due:
            return
        r = recorder
        cpu = r.cpu_seconds, r.cpu_clock_seconds
        consumer = r.consumer_seconds - r.pause_seconds
        total = ThroughputSample(r.steps, r.wait_seconds, consumer, r.work_seconds, *cpu, r.lag)
        now = total.since(self._mark)
        if not self._is_hopeless(now):
            if self._settling:
                if self._settle_seconds is None:
                    self._settle_seconds = _START_SECONDS[recorder.executor]
                settled = now.seconds >= self._settle_seconds and total.steps >= self._settled
                if settled and (now.is_quick or total.steps >= self._patience):
                    self._settling, self._mark = False, total
                return
            length = self._search.length
            enough = length * _STEPS_PER_WORKER * max(1, self.setting.workers)  # workers deliver in bursts
            left = length * _SAMPLE_SECONDS - now.seconds
            if left > 0:
                self._due = total.steps + max(1, min(64, now.steps, int(left / now.seconds_per_step / 2)))
                return
            if now.steps < enough and not (now.seconds >= length * _LONG_SECONDS and now.steps >= enough // 3):
                return
        if now.cpu_clock_seconds:
            self._cpu = now.cpu_seconds, now.cpu_clock_seconds
        before = self.setting
        now = now._replace(cpu_seconds=self._cpu[0], cpu_clock_seconds=self._cpu[1])
        self._search = search(self._search, now, self.bounds)
        self._mark = total
        if self.setting != before:
            self._settled = total.steps + in_flight() + 1
            grows = self.setting.workers > self._started
            self._started = max(self._started, self.setting.workers)
            self._settling, self._settle_seconds = True, None if grows else 0.0
            use(self.setting)

    def _is_hopeless(self, now: ThroughputSample) -> bool:
        """Return True if a trial of fewer workers fails even if each of them delivers another batch at once."""
        # Steps in flight when the number changed were not slower than others, so this holds while they are received.
        state, workers = self._search, self.setting.workers
        if not state.on_trial or workers >= state.best.workers or now.seconds < state.length * _SAMPLE_SECONDS:
            return False
        best_case = search(state, now._replace(steps=now.steps + max(1, workers)), self.bounds)
        return best_case.trial is None and best_case.best == state.best


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The workers that a loader may use: `most` of them, 0 for the consumer's thread, `prefetch` tasks ahead each."""

    executor: ExecutorName | Fleet
    most: int
    automatic: bool  # `most` is where the search begins
    prefetch: int
    timeout: float | None

    @classmethod
    def of(
        cls, num_workers: int | Literal["auto"], executor: ExecutorName | Fleet, prefetch: int, timeout: float | None
    ) -> Self:
        """Return the settings for these arguments of `dataload.Loader`."""
        automatic = num_workers == "auto"
        return cls(check_executor(executor), 1 if automatic else num_workers, automatic, prefetch, timeout)

    @property
    def here(self) -> bool:
        """True if this process makes the batches itself or in threads."""
        return self.workplace in ("serial", "threads")

    @property
    def workplace(self) -> Workplace:
        if not self.most:
            return "serial"
        if isinstance(self.executor, Fleet):
            return "ray"
        return "threads" if self.executor == "threads" else "processes"

    def start(self, work: StepWork) -> Executor[Any, Any]:
        window = self.prefetch * (usable_cpus() if self.automatic else self.most)
        timeouts = TimeoutPolicy(self.timeout)
        return make_executor(
            work, self.executor, self.most, window=window, timeouts=timeouts, settings=work.settings(),
            assign=work.assign,
        )  # fmt: skip

    def scaling(self, executor: Executor[Any, Any]) -> Scaling | None:
        if not self.most or (self.workplace == "ray" and not self.automatic):
            return None  # a rank of a shared fleet that asked it for less would get a smaller share than others
        # With a timeout, another thread must watch. A user who asks for processes gets at least one.
        least = 0 if self.here and self.timeout is None else 1
        most = None if self.automatic else self.most
        cpus = executor.capacity() if self.automatic else None
        return Scaling(most, self.prefetch, least=least, deepens=self.automatic and self.here, cpus=cpus)
