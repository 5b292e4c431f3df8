"""Data sets that TensorFlow Datasets wrote as ArrayRecord files, read without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from dataload.errors import ConfigError
from dataload.sources.array_record.reader import ArrayRecordSource
from dataload.sources.array_record.tfds_features import FEATURES_NAME, parse_features
from dataload.sources.array_record.tfds_info import INFO_NAME, parse_info, select_records
from dataload.storage import join, storage_of


class TfdsSource(ArrayRecordSource):
    """Records of a split: the features in ``features.json``, with the same values as from ``tfds.data_source``.

    Args:
        paths: The directory that contains ``dataset_info.json``, such as ``mnist/3.0.1``.
        split: ``"train"``, ``"train[:75%]"``, ``"train[10:20]+test"``, ``"train[2shard]"`` or ``"all"``. Percentages
            are rounded as in TensorFlow Datasets.
        fields: Names of the features to read, in that order; None means all. A feature includes those inside it.
        reader_options: See `ArrayRecordSource`.

    Raises:
        SourceNotFoundError: The directory lacks ``dataset_info.json`` or ``features.json``.
        UnsupportedFormatError: The records are not in ArrayRecord files, or a feature to be read is of an unsupported
            type; see `dataload.sources.array_record.tfds_features` for the supported ones.
        ConfigError: The split or a feature does not exist, or the split selects no records. On first use: a file has
            fewer records than ``dataset_info.json`` says.
        CorruptFileError: TensorFlow Datasets did not write one of the two files like this. On first use, see
            `ArrayRecordSource`.

    Example:
        >>> source = TfdsSource("mnist/3.0.1", split="train[:75%]")  # doctest: +SKIP
        >>> source[0]["label"]  # doctest: +SKIP
        4
    """

    format_name = "tfds"

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        split: str,
        fields: Sequence[str] | None = None,
        reader_options: str | None = None,
    ) -> None:
        several = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
        if len(several) != 1:
            raise ConfigError(
                f"TensorFlow Datasets keeps a data set in one directory, got {len(several)}: open each of them, and "
                "join them with ConcatSource",
                key="paths",
                value=paths,
            )
        self._directory = fspath(several[0])
        self._split = str(split)
        info = join(self._directory, INFO_NAME)
        parts = select_records(parse_info(_text(info), info), self._split)
        if not parts:
            message = f"split {self._split!r} of {self._directory} selects no records"
            raise ConfigError(message, key="split", value=split)
        features = join(self._directory, FEATURES_NAME)
        super().__init__(
            [f"{join(self._directory, part.file)}[{part.start}:{part.stop}]" for part in parts],
            fields=fields,
            codec=parse_features(_text(features), features, names=fields),
            reader_options=reader_options,
        )

    def __repr__(self) -> str:
        directory = self._directory if len(self._directory) < 80 else f"...{self._directory[-77:]}"
        fields = "" if self._selected is None else f", {len(self._selected)} fields"
        return f"TfdsSource({directory!r}, split={self._split!r}{fields})"[:199]


def split_names(directory: str | PathLike[str]) -> tuple[str, ...]:
    """Return the names of the splits in a directory, in the order of ``dataset_info.json``; see `TfdsSource`."""
    info = join(fspath(directory), INFO_NAME)
    return tuple(parse_info(_text(info), info))


def _text(path: str) -> str:
    return storage_of(path).read(path).decode(errors="replace")
