"""From a folder to the Hub: card, preflight of the engines, upload."""
