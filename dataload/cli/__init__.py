"""The command line. Only this package imports typer, and only this one and `dataload.analysis.live` rich."""
