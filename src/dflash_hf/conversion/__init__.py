"""
Drafters in other layouts and in llama.cpp's format.

    convert.py              from one layout to another
    gguf_write.py           a GGUF file, from a drafter and its target's tokenizer
    gguf_read.py            a drafter, or the configuration of a target, from a GGUF file
    gguf_names.py           keys and names of both
    llama_cpp_limits.py     what llama.cpp cannot run
    safetensors_folder.py   a folder that is written without `save_pretrained`
"""
