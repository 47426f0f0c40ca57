"""The conformance suite of vox, run on the backend that pyproject.toml names as `vox_backend`."""

from vox_testing.suite import *  # noqa: F403
