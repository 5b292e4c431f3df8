"""Training data from any format, in any order, resumable at any step.

```python
source = dataload.open("train-{000..127}.tar", decode="auto")
loader = dataload.Loader(source, batch_size=256, shuffle=True, seed=0, num_workers=2)
for batch in loader: ...
```
"""

from dataload._util.lazy import lazy_names

TYPE_CHECKING = False  # typing would take most of the time of `import dataload`

if TYPE_CHECKING:
    from dataload._util.clock import decoding
    from dataload.api import from_config
    from dataload.api import open_source as open  # noqa: A004 - dataload.open, as gzip.open
    from dataload.codecs.crops import CenterCrop, RandomResizedCrop
    from dataload.collate import Collate, Pack, Pad, Ragged, default_collate
    from dataload.convert.create import create
    from dataload.errors import ConfigError, CorruptFileError, DataloadError, StateMismatchError, WorkerError
    from dataload.loader.loader import Loader
    from dataload.sources.expression import field
    from dataload.sources.memory import MemorySource, RangeSource
    from dataload.sources.views.concat import concat, mix
    from dataload.sources.views.sequences import record_lengths, sequence_lengths
    from dataload.sources.views.windows import windows
    from dataload.storage import RemoteOptions
    from dataload.transforms import DROP, SampleContext
    from dataload.types import FieldSpec

__version__ = "0.2.0"

__all__ = [
    "DROP",
    "CenterCrop",
    "Collate",
    "ConfigError",
    "CorruptFileError",
    "DataloadError",
    "FieldSpec",
    "Loader",
    "MemorySource",
    "Pack",
    "Pad",
    "Ragged",
    "RandomResizedCrop",
    "RangeSource",
    "RemoteOptions",
    "SampleContext",
    "StateMismatchError",
    "WorkerError",
    "concat",
    "create",
    "decoding",
    "default_collate",
    "field",
    "from_config",
    "mix",
    "open",
    "record_lengths",
    "sequence_lengths",
    "windows",
]

_HOMES = {
    "DROP": "dataload.transforms",
    "CenterCrop": "dataload.codecs.crops",
    "Collate": "dataload.collate",
    "ConfigError": "dataload.errors",
    "CorruptFileError": "dataload.errors",
    "DataloadError": "dataload.errors",
    "FieldSpec": "dataload.types",
    "Loader": "dataload.loader.loader",
    "MemorySource": "dataload.sources.memory",
    "Pack": "dataload.collate",
    "Pad": "dataload.collate",
    "Ragged": "dataload.collate",
    "RandomResizedCrop": "dataload.codecs.crops",
    "RangeSource": "dataload.sources.memory",
    "RemoteOptions": "dataload.storage",
    "SampleContext": "dataload.transforms",
    "StateMismatchError": "dataload.errors",
    "WorkerError": "dataload.errors",
    "concat": "dataload.sources.views.concat",
    "create": "dataload.convert.create",
    "decoding": "dataload._util.clock",
    "default_collate": "dataload.collate",
    "field": "dataload.sources.expression",
    "from_config": "dataload.api",
    "mix": "dataload.sources.views.concat",
    "open": "dataload.api:open_source",
    "record_lengths": "dataload.sources.views.sequences",
    "sequence_lengths": "dataload.sources.views.sequences",
    "windows": "dataload.sources.views.windows",
}

_MOVED = {
    "BatchReader": "dataload.types",
    "ChangedFileError": "dataload.errors",
    "ClosedSourceError": "dataload.errors",
    "Codec": "dataload.types",
    "ColumnReader": "dataload.types",
    "ConcatSource": "dataload.sources",
    "MachineError": "dataload.errors",
    "MissingDependencyError": "dataload.errors",
    "MultiStreamLoader": "dataload.streams",
    "RandomAccessSource": "dataload.types",
    "RecordWriter": "dataload.types",
    "Sampler": "dataload.types",
    "Sharded": "dataload.types",
    "SourceError": "dataload.errors",
    "SourceNotFoundError": "dataload.errors",
    "Statistics": "dataload.analysis",
    "StoreError": "dataload.errors",
    "StreamContext": "dataload.streams",
    "TokenSource": "dataload.sources",
    "UnsupportedFormatError": "dataload.errors",
    "live_view": "dataload.analysis",
    "record_timeline": "dataload.analysis",
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
    "text",
    "transforms",
    "types",
)

if not TYPE_CHECKING:  # so that type checkers report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _HOMES, moved=_MOVED, submodules=_SUBMODULES)
