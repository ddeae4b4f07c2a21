"""`dflash demo`: the bundled SmolLM2 pair, decoded with each method on this machine."""
