"""Training data from any format, in any order, resumable at any step.

```python
source = dataload.open("train-{000..127}.tar", decode="auto")
loader = dataload.Loader(source, batch_size=256, shuffle=True, seed=0, num_workers=2)
for batch in loader: ...
```
"""

from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names

if TYPE_CHECKING:
    from dataload._util.clock import decoding
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
    from dataload.sources.memory import MemorySource, RangeSource
    from dataload.sources.tokens.reader import TokenSource
    from dataload.sources.views.concat import ConcatSource, concat, mix
    from dataload.sources.views.sequences import record_lengths, sequence_lengths
    from dataload.sources.views.windows import windows
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

_HOMES = {
    "DROP": "dataload.transforms",
    "BatchReader": "dataload.types",
    "ChangedFileError": "dataload.errors",
    "ClosedSourceError": "dataload.errors",
    "Codec": "dataload.types",
    "Collate": "dataload.collate",
    "ColumnReader": "dataload.types",
    "ConcatSource": "dataload.sources.views.concat",
    "ConfigError": "dataload.errors",
    "CorruptFileError": "dataload.errors",
    "DataloadError": "dataload.errors",
    "FieldSpec": "dataload.types",
    "Loader": "dataload.loader.loader",
    "MachineError": "dataload.errors",
    "MemorySource": "dataload.sources.memory",
    "MissingDependencyError": "dataload.errors",
    "MultiStreamLoader": "dataload.streams",
    "Pack": "dataload.collate",
    "Ragged": "dataload.collate",
    "RandomAccessSource": "dataload.types",
    "RangeSource": "dataload.sources.memory",
    "RecordWriter": "dataload.types",
    "RemoteOptions": "dataload.storage",
    "SampleContext": "dataload.transforms",
    "Sampler": "dataload.types",
    "Sharded": "dataload.types",
    "SourceError": "dataload.errors",
    "SourceNotFoundError": "dataload.errors",
    "StateMismatchError": "dataload.errors",
    "Statistics": "dataload.loader.statistics",
    "StoreError": "dataload.errors",
    "StreamContext": "dataload.streams",
    "TokenSource": "dataload.sources.tokens.reader",
    "UnsupportedFormatError": "dataload.errors",
    "WorkerError": "dataload.errors",
    "concat": "dataload.sources.views.concat",
    "create": "dataload.convert.sharded",
    "decoding": "dataload._util.clock",
    "default_collate": "dataload.collate",
    "from_config": "dataload.api",
    "live_view": "dataload.analysis.live",
    "mix": "dataload.sources.views.concat",
    "open": "dataload.api:open_source",
    "record_lengths": "dataload.sources.views.sequences",
    "record_timeline": "dataload.analysis.timeline",
    "sequence_lengths": "dataload.sources.views.sequences",
    "windows": "dataload.sources.views.windows",
}

_SUBMODULES = (
    "analysis",
    "api",
    "codecs",
    "collate",
    "convert",
    "errors",
    "executors",
    "loader",
    "samplers",
    "sources",
    "storage",
    "streams",
    "transforms",
    "types",
)

if not TYPE_CHECKING:  # so that type checkers report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _HOMES, submodules=_SUBMODULES)
