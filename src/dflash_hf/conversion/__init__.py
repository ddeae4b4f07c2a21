"""
Drafters in other layouts (`convert`) and as GGUF files: `gguf_write` and `gguf_read`, `gguf_names` (keys and names of
both), `llama_cpp_limits` (what llama.cpp cannot run), and `safetensors_folder` (a folder that `convert` and `gguf_read`
write).
"""
