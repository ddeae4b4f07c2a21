"""
Files of others as the one layout that the rest of the code knows.

Who claims a file first: `read.canonical_config` (1) lifts what is nested in `dflash_config`, which wins over the top
level; (2) refuses what names itself another method or head; (3) has each head read its own schema, in the order
of `TOKEN_HEADS`; (4) gives the file to the first row of `SOURCE_LAYOUTS` that recognises it, and to no other; (5)
takes layer ids that count the embedding only where `target_layer_ids` is not set. So a head goes before a layout,
speculators' files before all other layouts, and a file that two rows recognise is the upper row's.
"""
