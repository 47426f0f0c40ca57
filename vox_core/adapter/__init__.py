"""Adapters in canonical form: target modules, initialisation and storage."""
