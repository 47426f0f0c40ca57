"""The MLX backend passes vox's conformance suite."""

from vox_core.testing.suite import *  # noqa: F403

VOX_BACKEND = "mlx"
