"""The display of `vox train`, for plugins that show a run."""

from vox_core.display import RECENT_STEPS, Display, display

__all__ = ["RECENT_STEPS", "Display", "display"]
