"""The public names for plugins beside errors, contract and hookspecs: re-exports, nothing else.

    commands.py   click commands, options, output of the command line
    files.py      atomic files, bounded JSON, the cache
    generating.py    batches of generation, sampling
    installing.py    plans to install, uv, the catalog of plugins
    host.py       plugins: discover, probe, select, load
    models.py     models, adapters and backends
    plans.py      planned runs, before their first write
    progress.py   the display of vox train
    rows.py       data: rows, tokens, data sets
    serving.py    servers: address, API key, signals
    settings.py   sections of vox.toml
    runs.py       run folders and telemetry
    tokenizers.py    tokenizers, child processes
    tracking.py   trackers
    training.py   learners that take steps, bases that they share

tests/architecture/test_imports.py keeps plugins to these modules.
"""
