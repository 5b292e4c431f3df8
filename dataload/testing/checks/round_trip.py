"""Round trip: whatever hypothesis writes is read back."""

from __future__ import annotations

from typing import Any

from dataload.testing.cases import Maker, close, maker_check

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
        if hasattr(case.source, "read_batch"):
            case.check_batch(wanted, indices)
        close(case.source)

    holds()
