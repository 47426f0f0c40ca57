"""Trackers: the numbers of each event, and one run's curves after another's."""

from vox_core.trackers import Curves as Curves, Tracker as Tracker, scalars as scalars
