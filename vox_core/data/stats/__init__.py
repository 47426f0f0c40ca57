"""What there is in data files: counts, lengths, duplicates, languages."""
