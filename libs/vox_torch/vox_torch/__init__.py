"""The torch engine shared by vox's torch backends. Importing it does not import torch."""
