"""For tests of vox and of backends: models that are made in a moment and need no network."""
