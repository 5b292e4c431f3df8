"""Facades for the users of other loaders: change an import and keep working.

Each module speaks the names of one original and is a thin layer over the public parts of dataload:

- `dataload.compat.syrah`: Syrah's `File` and its torch data sets;
- `dataload.compat.torchrecord`: TorchRecord's `Writer`, `TorchRecord`, `TRDataset`, `TRSampler`;
- `dataload.compat.dali`: DALI's ``fn.readers.webdataset``;
- `dataload.compat.grain`: Grain's random access data sources;
- `dataload.compat.webdataset`: the part of WebDataset's fluid interface that maps on random access.
"""
