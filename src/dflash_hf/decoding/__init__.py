"""What makes decoding fast. Nothing here can change a text: verifying and accepting are `dflash_hf.modeling`'s."""
