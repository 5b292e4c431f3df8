"""Tables of Arrow: Parquet files, IPC files and streams, directories of Hugging Face, and CSV, all read by pyarrow."""
