"""Replacements for other libraries: change an import and keep the rest of your code.

Each module provides one library's interface on top of the public parts of dataload:

- `dataload.compat.syrah`: Syrah's `File` and its PyTorch datasets;
- `dataload.compat.torchrecord`: TorchRecord's `Writer`, `TorchRecord`, `TRDataset`, `TRSampler` and `DataLoader`;
- `dataload.compat.dali`: DALI's ``fn.readers.webdataset``;
- `dataload.compat.grain`: Grain's random access data sources;
- `dataload.compat.webdataset`: WebDataset itself, with an order that can resume;
- `dataload.compat.speechmatics`: the loaders of rows that continue, of the Speechmatics eBook.
"""
