"""Measure formats, orders and numbers of workers on your own data: the engine of ``dataload bench``.

Each measurement runs in a separate process: `task` describes it, `child` runs it, `runner` interleaves the repeats
and holds the results. ``benchmarks/``, in the repository and not in the installed package, measures made data, limits
and other loaders with the same engine.
"""
