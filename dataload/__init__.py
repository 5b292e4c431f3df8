"""Training data from any format, in any order, resumable at any step.

```python
source = dataload.open("train-{000..127}.tar", decode="auto")
loader = dataload.Loader(source, batch_size=256, shuffle=True, seed=0, num_workers=2)
for batch in loader: ...
```
"""

from dataload._util.decoding import decoding
from dataload.analysis.live import live_view
from dataload.analysis.timeline import record_timeline
from dataload.api import from_config
from dataload.api import open_source as open  # noqa: A004 - dataload.open, as gzip.open
from dataload.collate import Collate, Pack, Ragged, default_collate
from dataload.convert.sharded import create
from dataload.errors import (
    ChangedFileError,
    ClosedSourceError,
    ConfigError,
    CorruptFileError,
    DataloadError,
    MachineError,
    MissingDependencyError,
    SourceError,
    SourceNotFoundError,
    StateMismatchError,
    StoreError,
    UnsupportedFormatError,
    WorkerError,
)
from dataload.loader.loader import Loader
from dataload.loader.statistics import Statistics
from dataload.sources.concat import ConcatSource
from dataload.sources.memory import MemorySource
from dataload.sources.mix import concat, mix
from dataload.sources.range import RangeSource
from dataload.sources.sequences import record_lengths, sequence_lengths
from dataload.sources.tokens.reader import TokenSource
from dataload.sources.windows import windows
from dataload.storage import RemoteOptions
from dataload.streams import MultiStreamLoader, StreamContext
from dataload.transforms import DROP, SampleContext
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

__version__ = "0.2.0"

__all__ = [
    "DROP",
    "BatchReader",
    "ChangedFileError",
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
    "MachineError",
    "MemorySource",
    "MissingDependencyError",
    "MultiStreamLoader",
    "Pack",
    "Ragged",
    "RandomAccessSource",
    "RangeSource",
    "RecordWriter",
    "RemoteOptions",
    "SampleContext",
    "Sampler",
    "Sharded",
    "SourceError",
    "SourceNotFoundError",
    "StateMismatchError",
    "Statistics",
    "StoreError",
    "StreamContext",
    "TokenSource",
    "UnsupportedFormatError",
    "WorkerError",
    "concat",
    "create",
    "decoding",
    "default_collate",
    "from_config",
    "live_view",
    "mix",
    "open",
    "record_lengths",
    "record_timeline",
    "sequence_lengths",
    "windows",
]
