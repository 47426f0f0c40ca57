"""The display of `vox train`, for plugins that show a run."""

from vox_core.display import RECENT_STEPS as RECENT_STEPS, Display as Display, display as display
