"""vox's training against its peers on one NVIDIA GPU."""
