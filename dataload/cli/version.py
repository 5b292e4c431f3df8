"""``dataload --version``, which needs no other package."""

from dataload import __version__
from dataload.storage.core import core_name


def version_line() -> str:
    """Return the version, and whether the core is compiled."""
    return f"dataload {__version__} ({core_name()} core)"
