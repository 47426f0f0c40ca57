"""What the `vox data` commands do."""
