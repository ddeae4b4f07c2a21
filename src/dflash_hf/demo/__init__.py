"""A small pair, trained and decoded on this machine: `dflash demo`."""
