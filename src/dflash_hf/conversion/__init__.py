"""Drafters in other layouts, and in llama.cpp's format."""
