"""Certificates: hashes of batches that another machine, world size or release can verify."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self, cast

import numpy as np

from dataload._util.arrays import as_array
from dataload._util.fingerprint import fingerprint, identify, shows_address
from dataload._util.randomness import ORDER_VERSION
from dataload.analysis.shown import count_rows, has_others, has_rows, planned_rows, policy_of, row_of
from dataload.errors import ConfigError
from dataload.loader.failures import ErrorPolicy
from dataload.loader.loader import Loader
from dataload.loader.state import is_count
from dataload.samplers import BatchPlan
from dataload.sources.shards import locate

_VERSION = 2
_ROW_BYTES = 4  # the step's hash detects a difference; these only locate the row


@dataclass(frozen=True, slots=True)
class StepHashes:
    """Hashes of one step's batch, all ranks together."""

    order: str  # of the indices, 16 hexadecimal digits
    batch: str  # of the values, 32 hexadecimal digits
    rows: str  # a short hash of each row, base64


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Hashes of consecutive steps of a loader."""

    versions: dict[str, str]  # of dataload, its orders, and numpy
    source: str  # fingerprint of the data
    order: str  # fingerprint of the sampler
    step_size: int  # items per step, all ranks together
    epoch: int
    first: int  # number of the first step
    steps: tuple[StepHashes, ...]
    version: int = _VERSION  # of this format; in 1, some lists and dicts of numbers had equal hashes

    def to_json(self) -> str:
        """Return the certificate as JSON, one line per step."""
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "steps"}
        steps = ",\n".join(f"  {json.dumps(dataclasses.asdict(step))}" for step in self.steps)
        return f'{json.dumps(head)[:-1]}, "steps": [\n{steps}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            values = json.loads(text)
            if values["version"] not in (1, _VERSION):
                raise ConfigError("the certificate was made by a newer release of dataload: update dataload")
            steps = tuple(StepHashes(**step) for step in values.pop("steps"))
            found = cls(**values, steps=steps)
            if not all(map(is_count, (found.step_size, found.epoch, found.first))):
                raise ValueError("step_size, epoch and first must be integers of 0 or more")
            for step in steps:
                _rows(step)
            dict(found.versions)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ConfigError):  # a subclass of ValueError
                raise
            raise ConfigError(f"this is not a certificate of `dataload certify`: {error!r}") from error
        return found


def certify(loaders: Sequence[Loader[Any]], epoch: int, steps: range, *, release: str) -> Certificate:
    """Return the certificate of consecutive steps; `loaders` has one loader per rank, in rank order."""
    planner = loaders[0].batch_sampler
    return Certificate(
        versions={"dataload": release, "orders": str(ORDER_VERSION), "numpy": np.__version__},
        source=identify(loaders[0].source),
        order=fingerprint(planner.order),
        step_size=planner.step_size,
        epoch=epoch,
        first=steps.start,
        steps=tuple(_hash_step(loaders, epoch, step, _VERSION)[0] for step in steps),
    )


def check_certificate(certificate: Certificate, loaders: Sequence[Loader[Any]]) -> str | None:
    """Return the first difference between a certificate and the loaders' batches, or None; ranks may differ."""
    planner = loaders[0].batch_sampler
    if planner.step_size != certificate.step_size:
        raise ConfigError(
            f"the certificate's steps have {certificate.step_size} items over all ranks, these have "
            f"{planner.step_size}: choose world_size and loader.batch_size so that their product is the same"
        )
    last = certificate.first + len(certificate.steps)
    if last > (total := loaders[0].batch_sampler_of(certificate.epoch).steps(certificate.epoch)):
        return f"the certificate has step {last - 1} of epoch {certificate.epoch}, which has {total} steps here"
    for step, there in enumerate(certificate.steps, certificate.first):
        here, indices = _hash_step(loaders, certificate.epoch, step, certificate.version)
        if here != there:
            return (
                f"step {step} of epoch {certificate.epoch}: {_difference(certificate, there, here, indices, loaders)}"
            )
    return None


def _difference(
    certificate: Certificate, there: StepHashes, here: StepHashes, indices: list[int], loaders: Sequence[Loader[Any]]
) -> str:
    rows_there, rows_here = _rows(there), _rows(here)
    if len(rows_there) != len(rows_here):
        return f"{len(rows_there)} rows in the certificate, {len(rows_here)} here"
    row = next((row for row, pair in enumerate(zip(rows_there, rows_here, strict=True)) if pair[0] != pair[1]), None)
    source = loaders[0].source
    if there.order != here.order:
        changed = "sampler or seed" if fingerprint(loaders[0].batch_sampler.order) != certificate.order else "order"
        at = "" if row is None else f"; the first row that differs is {row}"
        return f"another {changed}: the step has other records than in the certificate{at}"
    if row is None:
        return "the hash of the step differs, although no row's hash does"
    name = f"row {row}"
    if len(indices) == len(rows_here):  # rows are records
        name += f", record {indices[row]} ({locate(source, indices[row])}),"
    data = "; the data set has another fingerprint" if identify(source) != certificate.source else ""
    return f"{name} has other values than in the certificate{data}"


def _rows(step: StepHashes) -> list[bytes]:
    packed = b64decode(step.rows)
    return [packed[start : start + _ROW_BYTES] for start in range(0, len(packed), _ROW_BYTES)]


def _hash_step(loaders: Sequence[Loader[Any]], epoch: int, step: int, version: int) -> tuple[StepHashes, list[int]]:
    """Return the hashes and the indices of a step of all ranks, in an order independent of the number of ranks."""
    rows: list[tuple[int, int, bytes]] = []
    records: list[tuple[int, int, int, int]] = []  # row, rank, number in the batch, index
    for rank, loader in enumerate(loaders):
        plan = loader.batch_sampler_of(epoch).plan(step, epoch=epoch)
        batch = loader.batch(epoch, step)
        rows += [(row, rank, digest) for row, digest in _hash_rows(batch, plan, policy_of(loader), version)]
        numbers = np.arange(len(plan.indices))
        if plan.valid is not None and plan.packing is None:
            numbers = numbers[plan.valid.ravel()]
        of_row = numbers // plan.chunk if plan.packing is None else plan.packing.rows
        records += zip(of_row.tolist(), repeat(rank), numbers.tolist(), plan.indices[numbers].tolist(), strict=False)
    digests = [digest for *_, digest in sorted(rows)]
    indices = [index for *_, index in sorted(records)]
    return StepHashes(
        order=hashlib.blake2b(np.array(indices, "<i8").tobytes(), digest_size=8).hexdigest(),
        batch=hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest(),
        rows=b64encode(b"".join(digest[:_ROW_BYTES] for digest in digests)).decode(),
    ), indices


def _hash_rows(batch: Any, plan: BatchPlan, policy: ErrorPolicy, version: int) -> list[tuple[int, bytes]]:
    """Return planned number and hash of each row, except for padding rows."""
    is_excluded = np.isin(plan.indices, policy.excluded_among(plan.indices))
    numbers = np.arange(planned_rows(plan))
    if is_excluded.any() and plan.packing is None and not has_others(plan, policy):
        numbers, plan = np.flatnonzero(~is_excluded), plan.without(is_excluded)
    mask: Any = plan.valid if plan.valid is not None and plan.valid.ndim == 1 else None
    if isinstance(batch, Mapping):
        fields = dict(cast("Mapping[str, Any]", batch))
        if mask is not None and "valid" in fields:
            mask = as_array(fields.pop("valid"))  # unlike the plan's mask, it excludes bad records
        # To add the mask, which depends on the number of ranks, the loader put an array batch into the field "data".
        batch = fields["data"] if fields.keys() == {"data"} else fields
    rows = count_rows(batch, plan)
    is_whole = planned_rows(plan) > 0 and not has_rows(batch)  # such as a single number
    if mask is None or np.shape(mask) != (rows,):
        mask = np.ones(max(1, rows), np.bool_)
    if len(numbers) != rows:  # bad records were left out, too, or a collation makes other rows
        numbers = np.arange(max(1, rows))
    found: list[tuple[int, bytes]] = []
    for row in range(1 if is_whole else rows):
        if mask[row]:
            hashed = _RowHash(version)
            hashed.add(batch if is_whole else row_of(batch, row, rows))
            found.append((int(numbers[row]), hashed.digest.digest()))
    return found


class _RowHash:
    """The hash of a row: of each value's kind, shape and bytes."""

    def __init__(self, version: int) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._version = version

    def add(self, value: Any) -> None:
        if isinstance(value, Mapping):
            fields = cast("Mapping[Any, Any]", value)
            if self._version > 1:
                self._add_text(f"{{{len(fields)}")
            for name in sorted(fields, key=str):
                self._add_text(repr(name))
                self.add(fields[name])
        elif isinstance(value, (list, tuple)):
            self._add_text(f"[{len(cast('list[Any]', value))}")
            for item in cast("list[Any]", value):
                self.add(item)
        elif hasattr(value, "__array__") and hasattr(value, "shape"):  # of numpy, torch or JAX
            self._add_array(value)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self.digest.update(b"b%d " % len(value))
            self.digest.update(value)
        elif shows_address(value):
            raise _not_hashable(value)
        else:
            self._add_text(repr(value))

    def _add_array(self, value: Any) -> None:
        array = as_array(value)
        if not isinstance(array, (np.ndarray, np.generic)):
            raise _not_hashable(value)
        array = np.asarray(array)
        if not isinstance(value, (np.ndarray, np.generic)) and array.dtype.name != str(value.dtype).split(".")[-1]:
            self._add_text(str(value.dtype))  # a dtype that numpy lacks
        if array.dtype.hasobject:
            self.add(array.tolist())
            return
        kind = array.dtype.newbyteorder("<")
        self._add_text(f"{kind.str}{array.shape}")
        self.digest.update(array.astype(kind, copy=False).tobytes())

    def _add_text(self, text: str) -> None:
        data = text.encode()
        if self._version > 1:  # tells [1, 23] from [12, 3]
            self.digest.update(b"%d " % len(data))
        self.digest.update(data)


def _not_hashable(value: Any) -> ConfigError:
    return ConfigError(
        f"the batches have values of {type(value).__name__}, which a certificate cannot compare: convert them to "
        "arrays, or remove them in a transform"
    )
