"""Recipes, launcher configurations and scripts to start from: name or copy these files."""
