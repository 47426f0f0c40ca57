"""The MLX backend passes vox's conformance suite."""

from vox_testing.suite import *  # noqa: F403

VOX_BACKEND = "mlx"
