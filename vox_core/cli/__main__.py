"""`python -m vox_core.cli`."""

from __future__ import annotations

from vox_core.cli import main

if __name__ == "__main__":
    main()
