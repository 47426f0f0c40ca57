"""Bundles: the plugins of a catalog's bundle as one file, and that file installed elsewhere.

    build.py     on a machine with the sources: wheels, packed
    verify.py    anywhere: the file held against its lock and the catalog, every fault told
    apply.py     where it is wanted: a plan to install its wheels, with no network

pip makes the wheels; install.py carries the plan out, as it does for single plugins, with the
installer seeing the bundle alone and holding it against the lock's hashes. The catalog decides what
belongs into a bundle (parts.py, needs.py), fit.py whether it is for an environment
(interpreter.py); archive.py has the file format, read.py and members.py read it without trust.
"""
