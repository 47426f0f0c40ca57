"""Rows as they will be trained, to be looked at: in the terminal and as a page."""
