import json

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from format_suite import FormatSuite

from dataload.codecs import example
from dataload.sources.array_record.tfds import TfdsSource
from dataload.testing import SourceTraits

_CLASSES = "tensorflow_datasets.core.features."


def feature_of(value):
    if isinstance(value, bytes):
        return {"pythonClassName": _CLASSES + "text_feature.Text", "text": {}}
    # An Example has no float64 but as bytes.
    dtype, encoding = ("int64", "none") if isinstance(value, int) else ("float64", "bytes")
    content = {"shape": {}, "dtype": dtype, "encoding": encoding}
    return {"pythonClassName": _CLASSES + "scalar.Scalar", "tensor": content}


class TestTfds(FormatSuite):
    """Directories as TensorFlow Datasets lays them out; arrays, which are scalars there without an axis: see golden."""

    traits = SourceTraits(value_types=(bytes, int, float), empty_dataset=False)

    def write(self, path, records):
        path.mkdir()
        split = {"name": "train", "shardLengths": [str(len(records))]}
        info = {"fileFormat": "array_record", "name": "demo", "splits": [split]}
        features = {name: feature_of(value) for record in records[:1] for name, value in record.items()}
        (path / "dataset_info.json").write_text(json.dumps(info))
        (path / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
        writer = ArrayRecordWriter(str(path / "demo-train.array_record-00000-of-00001"), "group_size:1")
        for record in records:
            values = {name: np.float64(v).tobytes() if isinstance(v, float) else v for name, v in record.items()}
            writer.write(example.encode(values))
        writer.close()

    source, options = TfdsSource, {"split": "train"}
