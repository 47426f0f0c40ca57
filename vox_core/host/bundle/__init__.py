"""Bundles: the plugins of a catalog's bundle as one file, and that file installed elsewhere.

    build.py     on a machine with the sources: wheels, packed
    verify.py    anywhere: the file held against its lock and the catalog, every fault told
    apply.py     where it is wanted: its wheels installed, with no network

pip does the work: it makes the wheels, and it installs them, from the bundle alone and against the
lock's hashes. The catalog decides what belongs into a bundle (parts.py); archive.py has the file
format, read.py reads it without trust.
"""
