"""Model cards: the template that `dflash_hf.hub.card` fills in, and rendered examples."""
