"""The services behind the commands: train, merge, load. Only this package writes results."""
