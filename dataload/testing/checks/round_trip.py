"""Round trip: whatever hypothesis writes is read back."""

from __future__ import annotations

from typing import Any

from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.testing.cases import Maker, close, expect_equal, expect_raises, maker_check

_EXAMPLES = 20


@maker_check("Round trip")
def check_round_trip(maker: Maker) -> None:
    """Any records that the format can hold, read by any request, equal what was written.

    Varying shapes, no shape, values of zero bytes, NaNs, non-ASCII text, one record, many equal ones.
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
        case.check_single_reads(case.indices)
        case.check_request(wanted, indices)
        read_batch = getattr(case.source, "read_batch", None)
        if read_batch is not None:
            _check_batch(read_batch, indices, case.expected(wanted))
        close(case.source)

    holds()


def _check_batch(read_batch: Any, indices: list[int], records: list[Any]) -> None:
    try:
        want = default_collate(records)
    except ConfigError:
        expect_raises(ConfigError, lambda: read_batch(indices), f"read_batch({indices}) of records that differ")
        return
    expect_equal(read_batch(indices), want, f"read_batch({indices})")
