"""The way of one batch: order, pipeline, step, fetch, and back to the consumer."""

from dataload.loader.loader import Loader

__all__ = ["Loader"]
