"""The public names for plugins beside errors, contract and hookspecs: re-exports, nothing else.

    commands.py   click commands, options, output of the command line
    runs.py       run folders and telemetry
    files.py      atomic files, bounded JSON
    models.py     models, adapters and backends

tests/architecture/test_imports.py keeps plugins to these modules.
"""
