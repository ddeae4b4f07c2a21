"""Tiny targets that read images, with their processors: of the kinds of Qwen2.5-VL, Qwen3.5, Gemma 3 and Idefics3."""

import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, ProcessorMixin

from support.pairs import COMMON, DELTA, SLIDING
from support.tiny_chat import END, PAD, make_tokenizer


ROWS = 280  # of the embedding
PLACE = {"gemma3": "<start_of_image>", "idefics3": "<image>"}
PLACE |= dict.fromkeys(("qwen2_5_vl", "qwen3_5"), "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4}
SIGLIP = {**TOWER, "num_hidden_layers": 1, "image_size": 16}
TEXT = {**COMMON, "vocab_size": ROWS}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}


def processor_of(kind: str):
    """The processor of a kind: four tokens for each image. That of Qwen lacks the part for videos."""
    named = {"boi_token": PLACE[kind], "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = make_tokenizer(TEMPLATE.replace("PLACE", PLACE[kind]), **(named if kind == "gemma3" else {}))
    options = {"tokenizer": tokenizer, "chat_template": tokenizer.chat_template}
    if kind == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(images, image_seq_length=4, **options)
    if kind == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

        sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
        return Idefics3Processor(
            Idefics3ImageProcessorPil(**sizes, do_image_splitting=False), image_seq_len=4, **options
        )
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class WithoutVideos(Qwen3VLProcessor if kind == "qwen3_5" else Qwen2_5_VLProcessor):
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer"]

        def __init__(self, image_processor, tokenizer, chat_template=None, **kwargs):
            self.image_token = PLACE[kind]
            self.video_token = "<|video_pad|>"
            self.image_token_id, self.video_token_id = map(
                tokenizer.convert_tokens_to_ids, (PLACE[kind], "<|video_pad|>")
            )
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer.add_special_tokens({"additional_special_tokens": [PLACE[kind], "<|video_pad|>"]})
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 256, "max_pixels": 256}
    return WithoutVideos(Qwen2VLImageProcessorPil(**patches), **options)


def target_of(kind: str, processor):
    """A random target of a kind."""
    id_of = processor.tokenizer.convert_tokens_to_ids
    if kind.startswith("qwen"):
        tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
        tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
        tokens = {"image_token_id": id_of(PLACE[kind]), "video_token_id": id_of("<|video_pad|>")}
        config = {"text_config": {**TEXT, **ROPE}, "vision_config": tower, **tokens}
        config["vision_start_token_id"] = ROWS - 1
        if kind == "qwen3_5":
            config["text_config"] |= {**DELTA, "partial_rotary_factor": 1.0}
            tower["num_position_embeddings"] = 16
        else:
            tower |= {"window_size": 8, "fullatt_block_indexes": [0]}
    elif kind == "gemma3":
        names = {"image": "<image_soft_token>", "boi": PLACE[kind], "eoi": "<end_of_image>"}
        tokens = {f"{name}_token_index": id_of(token) for name, token in names.items()}
        config = {"text_config": {**TEXT, **SLIDING}, "vision_config": SIGLIP, "mm_tokens_per_image": 4, **tokens}
    else:
        text = {"model_type": "llama", **TEXT}
        config = {
            "text_config": text,
            "vision_config": SIGLIP,
            "scale_factor": 2,
            "image_token_id": id_of(PLACE[kind]),
        }
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**config)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
        target.get_output_embeddings().weight[id_of(PLACE[kind])] = 0.0  # it writes no images
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = PAD
    return target.requires_grad_(False)


def picture(number: int, width: int = 16):
    """A picture of its own colours."""
    image = Image.new("RGB", (width, 16))
    image.putdata([(40 * number % 256, 9 * x % 256, 9 * y % 256) for y in range(16) for x in range(width)])
    return image


def save_seeing(folder, kind: str, monkeypatch):
    """A target and its processor in a folder; Qwen's processor is not loaded from it, see [`processor_of`]."""
    processor = processor_of(kind)
    target = target_of(kind, processor)
    target.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    if kind.startswith("qwen"):
        monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda name, **options: processor_of(kind))
    else:
        processor.save_pretrained(folder)
    return target, processor
