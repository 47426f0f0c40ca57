"""What a run folder tells of its run, while it works and afterwards.

    summary.py   the run so far, from its telemetry
    find.py      run folders, and whether a process works in one
    compare.py   two runs: what differs, and which is better
    plot.py      loss curves as a picture

Everything here only reads, and takes what it reads for a stranger's: lines that are wrong are
passed over and counted. No array library is imported, matplotlib alone by plot.py.
"""
