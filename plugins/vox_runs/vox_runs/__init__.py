"""`vox runs`: list, show, watch, compare and plot run folders."""
