"""Training a drafter: trainer, blocks, losses, features on disk, recipes."""
