"""Recipes, launcher configurations and scripts to start from: `dflash recipes` lists, shows and copies them."""
