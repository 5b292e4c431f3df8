"""ArrayRecord files by the package's own writer."""

from array_record.python.array_record_module import ArrayRecordWriter

PLAIN = "group_size:1,uncompressed"


def write_records(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)
