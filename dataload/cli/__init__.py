"""The command line. No other package imports typer; besides this one, only `dataload.analysis.live` imports rich."""


def version_line() -> str:
    """Return the version, and whether the core is compiled. Loads no other package."""
    from dataload import __version__
    from dataload.storage.core import core_name

    return f"dataload {__version__} ({core_name()} core)"
