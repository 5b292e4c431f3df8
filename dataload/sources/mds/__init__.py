"""Data sets of MosaicML Streaming."""
