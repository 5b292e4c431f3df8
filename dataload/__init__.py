"""Training data from any format, in any order, resumable at any step.

```python
source = dataload.open("train-{000..127}.tar", decode="auto")
loader = dataload.Loader(source, batch_size=256, shuffle=True, seed=0, num_workers=2)
for batch in loader: ...
```
"""

from dataload.build import create, from_config
from dataload.build import open_source as open  # noqa: A004 - dataload.open, as gzip.open
from dataload.collate import Collate, Ragged, default_collate
from dataload.errors import (
    ClosedSourceError,
    ConfigError,
    CorruptFileError,
    DataloadError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StateMismatchError,
    UnsupportedFormatError,
    WorkerError,
)
from dataload.live import live_view
from dataload.loader import Loader
from dataload.multistream import MultiStreamLoader, StreamContext
from dataload.packing import Pack
from dataload.sources.concat import ConcatSource
from dataload.sources.memory import MemorySource
from dataload.sources.range import RangeSource
from dataload.sources.sequences import sequence_lengths
from dataload.sources.tokens import TokenSource
from dataload.statistics import Statistics
from dataload.timeline import record_timeline
from dataload.transforms import SampleContext
from dataload.types import (
    BatchReader,
    Codec,
    ColumnReader,
    FieldSpec,
    RandomAccessSource,
    RecordWriter,
    Sampler,
    Sharded,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "BatchReader",
    "ClosedSourceError",
    "Codec",
    "Collate",
    "ColumnReader",
    "ConcatSource",
    "ConfigError",
    "CorruptFileError",
    "DataloadError",
    "FieldSpec",
    "Loader",
    "MemorySource",
    "MissingDependencyError",
    "MultiStreamLoader",
    "Pack",
    "Ragged",
    "RandomAccessSource",
    "RangeSource",
    "RecordWriter",
    "SampleContext",
    "Sampler",
    "Sharded",
    "SourceError",
    "SourceNotFoundError",
    "StateMismatchError",
    "Statistics",
    "StreamContext",
    "TokenSource",
    "UnsupportedFormatError",
    "WorkerError",
    "create",
    "default_collate",
    "from_config",
    "live_view",
    "open",
    "record_timeline",
    "sequence_lengths",
]
