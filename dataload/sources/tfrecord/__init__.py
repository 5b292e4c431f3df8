"""TFRecord files."""
