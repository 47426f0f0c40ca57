"""By what rows are chosen: which are used, which are left out and why, which are held out.

    content.py   what a row says, as a digest
    facts.py     what policies ask of the rows of one file, in columns; taken once and kept
    choose.py    facts and a policy -> what becomes of every row
    near.py      rows that say nearly the same (MinHash)
    leaks.py     held-out rows that are trained on, too
    mask.py      which lines of a file are used
    reasons.py   the table of what may become of a row
    report.py    rows in and out, for people and programs
    shelf.py     arrays in the cache

Files stay as they are: choosing gives a mask for each, and of a split, two.
"""
