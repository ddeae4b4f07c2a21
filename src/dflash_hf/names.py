"""Names that both a command's help and the room behind it must know: light, since help does not wait for torch."""

SERVERS = ("vllm", "sglang")  # engines with a launch line
ENGINES = (*SERVERS, "transformers")  # that read a drafter's folder
LAYOUTS = ("native", "z-lab")  # that a drafter can be written in
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # of a model to its base, by the Hub's words
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
