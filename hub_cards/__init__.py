"""Model cards: the template that `dflash_hf.card` fills in, and rendered examples."""
