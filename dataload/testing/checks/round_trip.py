"""Round trip: whatever is written is read, found by hypothesis."""

from __future__ import annotations

from typing import Any

from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.testing.cases import Maker, expect_equal, expect_raises, maker_check

_EXAMPLES = 20


@maker_check("Round trip", since="0.1")
def check_round_trip(maker: Maker) -> None:
    """Any records that the format holds, read by any request, are what was written.

    Shapes that vary, no shape, values of no bytes, NaNs, text outside of ASCII, one record, many of one kind.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from dataload.testing.strategies import records_for, requests_for

    @settings(max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(records=records_for(maker.traits), data=st.data())
    def holds(records: list[Any], data: Any) -> None:
        case = maker.case(records)
        indices = data.draw(requests_for(len(records), negative=maker.traits.negative_index), label="request")
        wanted = [index % len(records) for index in indices]
        case.check_records(list(case.indices), [case.source[index] for index in case.indices])
        read = getattr(case.source, "__getitems__", None)
        if read is not None:
            case.check_records(wanted, read(indices))
        read_batch = getattr(case.source, "read_batch", None)
        if read_batch is not None:
            _check_batch(read_batch, indices, case.expected(wanted))
        if hasattr(case.source, "close"):
            case.source.close()

    holds()


def _check_batch(read_batch: Any, indices: list[int], records: list[Any]) -> None:
    try:
        want = default_collate(records)
    except ConfigError:
        expect_raises(ConfigError, lambda: read_batch(indices), f"read_batch({indices}) of records that differ")
        return
    expect_equal(read_batch(indices), want, f"read_batch({indices})")
