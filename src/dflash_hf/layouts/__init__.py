"""
Files of other projects as the one layout that the rest of the code knows, z-lab's.

`source_layout.py` says what a layout is, `all_layouts.py` lists them, and each of the other projects has a file.
`read.py` converts a `config.json`, in the order that is numbered in `canonical_config`; `configuration.py` and
`check.py` are the configuration and its rules. `tensor_names.py`, `checkpoint_files.py` and `checkpoint.py` are about
tensors. `loading.py` is `DFlashDraftModel.from_pretrained`, from a name to a drafter.
"""
