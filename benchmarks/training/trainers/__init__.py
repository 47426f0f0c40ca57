"""Who trains. Each module has `train(task, diary)`, which ends when the adapter is on the disk."""
