"""
Drafters in other layouts (`convert`) and as GGUF files: `gguf_write` and `gguf_read`, `gguf_names` (keys and names of
both), and `llama_cpp_limits` (what llama.cpp cannot run).
"""
