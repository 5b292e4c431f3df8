"""What all kinds of the section ``sampler`` share: where a table stands, and errors that say so."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dataload._util.randomness import derive_key
from dataload.config.problems import Problem, named_under
from dataload.config.section import Section
from dataload.samplers import BatchPlanner
from dataload.sources.base import Source
from dataload.types import Sampler

__all__ = ["BatchesSection", "BuildContext", "OrderSection", "SamplerSection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Where a sampler's table stands, and what is there to build from.

    Attributes:
        key: Of the table, as messages name it: ``"sampler.parent"``.
        source: The records to order.
        parts: The sources that `source` joins; itself where it joins none.
        seed: For a sampler that is given none.
        batch_size: `loader.batch_size`.
        world_size: Number of ranks.
    """

    key: str
    source: Source[Any]
    parts: tuple[Source[Any], ...]
    seed: int
    batch_size: int | None = None
    world_size: int = 1

    def seed_or(self, given: int | None) -> int:
        """A sampler's own seed, or that of the context."""
        return self.seed if given is None else given

    def inner(self, name: str, seed: int | None = None) -> BuildContext:
        """The context of the nested table `name`, below a sampler with this seed."""
        return replace(self, key=f"{self.key}.{name}", seed=self.seed_or(seed))

    def part(self, i: int, seed: int) -> BuildContext:
        """The context of the sampler of part `i`. Its seed is its own, lest parts of one length come in one order."""
        source = self.parts[i]
        own = int(derive_key(seed, "mixture-part", i, words=1)[0])
        return replace(self.inner(f"samplers[{i}]", own), source=source, parts=(source,))


class SamplerSection(Section):
    """A table of the section ``sampler``."""

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """What is wrong with this table, standing at `key`, and with those in it.

        Args:
            key: As in `BuildContext`.
            parts: Sources that there are to mix; 0 where there is one and no list of them.
        """
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SamplerSection):
                yield from value.contradictions(f"{key}.{name}", parts)


class OrderSection(SamplerSection):
    """A table that stands for a sampler."""

    def build(self, context: BuildContext) -> Sampler:
        """The sampler.

        Raises:
            ConfigError: It cannot be; the error names the setting below the key of the context.
        """
        with named_under(context.key, type(self).model_fields):
            return self._order(context)

    @abstractmethod
    def _order(self, context: BuildContext) -> Sampler: ...


class BatchesSection(SamplerSection):
    """A table that stands for order and batches in one."""

    def build(self, context: BuildContext) -> BatchPlanner:
        """The batch sampler.

        Raises:
            ConfigError: It cannot be; the error names the setting below the key of the context.
        """
        with named_under(context.key, type(self).model_fields):
            return self._batches(context)

    @abstractmethod
    def _batches(self, context: BuildContext) -> BatchPlanner: ...
