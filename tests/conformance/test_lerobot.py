import numpy as np
from format_suite import FormatSuite, digest_of
from lerobots import write_lerobot

from dataload.sources.lerobot.reader import LeRobotSource
from dataload.testing import SourceTraits


def state_of(record):
    return np.frombuffer(digest_of(record, 24), np.uint8).astype(np.float32)


class TestLeRobot(FormatSuite):
    """Episodes without videos; golden files are by LeRobot itself."""

    traits = SourceTraits(
        value_types=(int,), several_paths=False, empty_dataset=False, has_checksums=False, notices_cuts=False
    )
    source, options = LeRobotSource, {"fields": ["state"]}

    def write(self, path, records):
        if not records:
            raise ValueError("an episode has records")
        first = -(-len(records) // 3)
        lengths = [n for n in (first, first, len(records) - 2 * first) if n > 0]
        lengths = lengths if sum(lengths) == len(records) else [len(records)]
        write_lerobot(path, lengths, {"state": np.stack([state_of(record) for record in records])})

    def expected(self, records):
        return [{"state": state_of(record)} for record in records]
