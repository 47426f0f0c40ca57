"""`vox bundle`: the plugins of a catalog's bundle as one file, and that file installed elsewhere.

archive.py has the file format and what the catalog puts into a bundle; build.py makes the file with
uv; verify.py reads it without trust; install.py plans its installation without a network.
"""
