"""Model cards: the template that `dflash_hf.hub` fills in, and rendered examples."""
