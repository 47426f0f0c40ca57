"""The services behind `vox data`: what each command does, without a word on the terminal."""
