"""The public names for plugins beside errors, contract and hookspecs: re-exports, nothing else.

    commands.py   click commands, options, output of the command line
    plans.py      planned runs, before their first write
    progress.py   the display of `vox train`
    runs.py       run folders and telemetry
    files.py      atomic files, the cache

tests/architecture/test_imports.py keeps plugins to these modules.
"""
