"""
Drafters in the layouts of other projects.

The *published layout* is that of z-lab's drafters. It is the only one that the rest of the code knows, and the one in
which drafters are saved. A `config.json` that was converted to it is *canonical*. The others are *source layouts*.

    source_layout.py   what a layout is; all_layouts.py lists them, each project has a file
    read.py            from a `config.json` in any layout to the published layout: `canonical_config`
    precedence.py      which value is used where a file gives several
    head_schemas.py    names, keys and checks of the token heads
    configuration.py   `DFlashDraftConfig`; check.py has its checks in their order
    tensor_names.py, checkpoint_files.py, checkpoint.py   names of tensors, and checks of weights
    loading.py         `DFlashDraftModel.from_pretrained`: from a name to a drafter

`dflash check DRAFT -v` logs the layout of a file, and warnings say which of two contradicting values is used.
"""
