"""Data sets of MosaicML Streaming: the format MDS and its options."""

import re
from dataclasses import dataclass, field

from dataload.sources.format import Format
from dataload.sources.options import MappedOptions

INDEX_NAME = "index.json"

_INDEX = re.compile(rb'\s*\{\s*("version"\s*:\s*\d+\s*,\s*)?"shards"\s*:')


@dataclass(frozen=True, slots=True, kw_only=True)
class MDSOptions(MappedOptions):
    """Options for reading data sets of MosaicML Streaming.

    Attributes:
        decode: Decode images; if False, ``jpeg`` and ``png`` are the bytes of their files.
        allow_pickle: Unpickle columns of the encoding ``pkl``. Pickles run any code that their author wants.
    """

    decode: bool = True
    allow_pickle: bool = field(default=False, metadata={"content": False})


MDS = Format(
    name="mds",
    source="dataload.sources.mds.reader:MDSSource",
    reader_options=MDSOptions,
    magic=lambda head: _INDEX.match(head) is not None,
    directory_file=INDEX_NAME,
    extra="mds",
)
