"""The torch engine that vox's torch backends share. Importing it imports no torch."""
