"""Measure formats, orders and loaders on your own data or on made data: the engine of ``dataload bench``.

Each measurement runs in a process of its own: `task` describes it, `child` runs it, `runner` interleaves the repeats
and `results` holds the figures. `timing`, `workloads`, `data` and `results` also serve the regression cases in
``benchmarks/``, which holds the peers, too: both are in the repository and not in the installed package.
"""
