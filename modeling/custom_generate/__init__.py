"""Entry point of `target.generate(custom_generate="<drafter repository>")`."""
