import json

from format_suite import FormatSuite
from made_files import pack

from dataload.sources.tar.reader import WidsSource
from dataload.testing import SourceTraits


class TestWids(FormatSuite):
    """One archive for each index, beside it."""

    traits = SourceTraits(
        suffix=".json",
        several_paths=True,
        value_types=(bytes,),
        corruptions=("other_count", "cut_archive", "no_archive"),
    )

    def write(self, path, records):
        named = [(f"{row:06d}.{name}", value) for row, record in enumerate(records) for name, value in record.items()]
        archive = pack(path.parent / f"{path.name}.tar", named)
        shard = {"url": archive.name, "nsamples": len(records)}
        path.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [shard]}))

    source, keyed = WidsSource, True

    def corrupt(self, path, kind):
        archive = path.parent / f"{path.name}.tar"
        if kind == "other_count":
            path.write_text(path.read_text().replace('"nsamples": 12', '"nsamples": 11'))
        elif kind == "no_archive":
            archive.unlink()
        else:
            archive.write_bytes(archive.read_bytes()[:3072])
