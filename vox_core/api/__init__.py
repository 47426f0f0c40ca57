"""The public names for plugins beside errors, contract and hookspecs: re-exports, nothing else.

    commands.py   click commands, options, output of the command line
    rows.py       data: rows, tokens, data sets
    settings.py   sections of vox.toml
    runs.py       run folders and telemetry
    files.py      atomic files

tests/architecture/test_imports.py keeps plugins to these modules.
"""
