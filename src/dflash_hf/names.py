"""Names that both a command's help and the room behind it must know: light, since help does not wait for torch."""

SERVERS = ("vllm", "sglang")  # engines with a launch line
ENGINES = (*SERVERS, "transformers")  # that read a drafter's folder
LLAMA_CPP = "llama.cpp"  # reads GGUF files: its rules are `dflash_hf.gguf_format.limits`
READERS = ("mlx", "openvino", "z-lab")  # that read a drafter's folder by loaders of their own
LAYOUTS = ("native", "z-lab", "gguf")  # that a drafter can be written in
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # of a model to its base, by the Hub's words
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
Q8 = "q8_0"  # of GGUF files alone
