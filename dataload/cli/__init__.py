"""The command line. No other package imports typer; besides this one, only `dataload.analysis.live` imports rich."""
