"""TFRecord files: the format and its options."""

from dataclasses import dataclass

from dataload.sources.format import Format
from dataload.sources.options import CodecOptions, CodecReadOptions, deprecated_verify


@dataclass(frozen=True, slots=True, kw_only=True)
class TFRecordOptions(CodecReadOptions):
    """Options for reading TFRecord files.

    Attributes:
        codec: Decodes a record's bytes: the name of a codec, usually ``"example"`` or ``"sequence_example"``, a
            function ``bytes -> record``, or an object with ``decode``. None returns bytes.
        verify_checksums: Deprecated, see `verify`.
    """

    verify_checksums: bool | None = deprecated_verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class TFRecordWriterOptions(CodecOptions):
    """Options for writing TFRecord files.

    Attributes:
        codec: Encodes records: the name of a codec or an object with ``encode``. By default bytes are written as they
            are, and fields as ``tf.train.Example``.
    """


TFRECORD = Format(
    name="tfrecord",
    source="dataload.sources.tfrecord.records:TFRecordSource",
    writer="dataload.sources.tfrecord.records:TFRecordWriter",
    reader_options=TFRecordOptions,
    writer_options=TFRecordWriterOptions,
    suffixes=(".tfrecord", ".tfrecords"),
    magic="dataload.sources.tfrecord.records:is_tfrecord",
    extra="tfrecord",
    content="bytes",
    default_codec="example",
)
