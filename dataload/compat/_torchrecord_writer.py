"""TorchRecord's `Writer`; see `dataload.compat.torchrecord`."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from typing import Any

from dataload._util.indexing import even_split
from dataload._util.optional import load_optional
from dataload.compat._tensor_protos import BYTE, message_class
from dataload.errors import ConfigError
from dataload.sources.lmdb.file import is_torchrecord
from dataload.sources.lmdb.write_environment import NewEnvironment
from dataload.storage.errors import file_errors

__all__ = ["Writer", "default_data_process_func"]


def default_data_process_func(data: str) -> Any:
    """A picture and its label as `TensorProtos`.

    Args:
        data: ``"path/of/picture.jpg 3"``.

    Returns:
        Two tensors of type BYTE: RGB pixels in rows, with dims [width, height], and the text of the label.

    Raises:
        IndexError: There is no label.
        MissingDependencyError: Pillow or protobuf is not installed.
    """
    image_module = load_optional("PIL.Image", needed_by="default_data_process_func", extra="tar", package="pillow")
    parts = data.split(" ")
    if len(parts) < 2:
        raise IndexError(f"a line of the data list should be 'path label', got {data!r}")
    message = message_class("TensorProtos")()
    with image_module.open(parts[0]) as file:
        picture = file.convert("RGB")
    message.protos.add(dims=picture.size, data_type=BYTE, byte_data=picture.tobytes())
    message.protos.add(data_type=BYTE, byte_data=parts[1].encode())
    return message


class Writer:
    """Writes what a list names into a TorchRecord.

    Args:
        data_list: Path of a .txt or .csv file, one item a line.
        output_dir: Directory to write to; made if it is missing. Other files in it stay.
        map_size: Accepted: the map grows as it has to.
        db_num: Number of sub-databases, which get equal parts.
        shuffle: Shuffle the lines first, as ``random.shuffle`` does.
        data_process_func: Line -> `TensorProtos`, or whatever has ``SerializeToString``.

    Raises:
        ConfigError: There is no `data_list`, or it is named otherwise, or `db_num` is less than 1.
    """

    def __init__(
        self,
        data_list: str | None = None,
        output_dir: str = "./torchrecord",
        map_size: int = 1 << 40,
        db_num: int = 1,
        shuffle: bool = True,
        data_process_func: Callable[[str], Any] = default_data_process_func,
    ) -> None:
        if data_list is None or not os.fspath(data_list).endswith((".txt", ".csv")):
            raise ConfigError(
                f"data_list should be a .txt or .csv file, got {data_list!r}", key="data_list", value=data_list
            )
        if db_num < 1:
            raise ConfigError(f"db_num must be at least 1, got {db_num}", key="db_num", value=db_num)
        self.data_list, self.output_dir = data_list, output_dir
        self.map_size, self.db_num = map_size, db_num
        self.shuffle, self.data_process_func = shuffle, data_process_func

    def parse_data_list(self) -> list[str]:
        """The lines, in the order of writing."""
        with file_errors(self.data_list), open(self.data_list) as stream:
            lines = [line.strip() for line in stream]
        if self.shuffle:
            random.shuffle(lines)
        return lines

    def write(self) -> None:
        """Write everything.

        Raises:
            ConfigError: `output_dir` holds an LMDB environment that is no TorchRecord.
            SourceError: The data list cannot be read, or the disk is full.
            OSError: `output_dir` cannot be made or written to.
            MissingDependencyError: lmdb is not installed.
        """
        lines = self.parse_data_list()
        spans = even_split(len(lines), self.db_num)
        width = len(str(max(stop - start for start, stop in spans)))  # one for all: the original's reader needs that
        destination = os.path.join(self.output_dir, "data.mdb")
        if os.path.exists(destination) and not is_torchrecord(self.output_dir):
            raise ConfigError(
                f"{destination} is no TorchRecord and is not replaced: choose another output_dir", key="output_dir"
            )
        os.makedirs(self.output_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.output_dir) as folder:
            with closing(NewEnvironment(folder, "format 'torchrecord'", self.db_num)) as environment:
                for number, (start, stop) in enumerate(spans):
                    for place, line in enumerate(lines[start:stop]):
                        value = self.data_process_func(line).SerializeToString()
                        environment.put(b"%0*d" % (width, place), value, database=number, append=True)
                environment.finish()
            os.replace(os.path.join(folder, "data.mdb"), destination)
