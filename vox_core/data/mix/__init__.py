"""Several files of rows made into one, in proportions that somebody asked for."""
