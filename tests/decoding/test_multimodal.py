"""Targets that read images: with text alone, with an image before the text, with positions of several axes."""

import pytest
import torch
from support.pairs import COMMON, DELTA, SLIDING, VOCAB, make_draft
from support.scripted_draft import scripted
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText


IMAGE = 90  # the token that an image's features replace
TEXT = {**COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN = {"vision_config": TOWER, "image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
WRAPPERS = {
    "qwen3_vl": {"text_config": TEXT, **QWEN},
    "qwen3_5": {"text_config": {**TEXT, **DELTA, "partial_rotary_factor": 1.0}, **QWEN},
    "gemma3": {
        "text_config": {**COMMON, **SLIDING},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": 92,
        "eoi_token_index": 93,
    },
    "gemma4": {
        "text_config": {
            **COMMON,
            **SLIDING,
            "global_head_dim": 16,  # layers of two shapes
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {**SIGLIP, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2},
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "audio_token_id": 92,
        "boi_token_id": 93,
        "eoi_token_id": 94,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **COMMON, "sliding_window": 8},
        "vision_config": {"model_type": "pixtral", **SIGLIP},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
    },
}
GRIDS = {"qwen3_vl", "qwen3_5"}  # whose pixels come as rows of patches


def make_wrapper(name):
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**WRAPPERS[name])).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target.requires_grad_(False)


def picture(name, rows: int) -> dict:
    """Prompts of different lengths with one image each, of four tokens."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 80, (rows, 14), generator=random)
    mask = torch.ones_like(ids)
    ids[:, 6:10] = IMAGE
    for row in range(1, rows):
        ids[row, :row] = 0
        mask[row, :row] = 0
    types = {"mm_token_type_ids": (ids == IMAGE).int()} if name in {*GRIDS, "gemma4"} else {}
    if name in GRIDS:
        pixels = {
            "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=random),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        }
    elif name == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(rows, 16, 2)
        pixels = {"pixel_values": torch.rand(rows, 16, 48, generator=random), "image_position_ids": places}
    else:
        pixels = {"pixel_values": torch.randn((rows, 3, 16, 16), generator=random)}
    if name == "gemma3":
        types = {"token_type_ids": (ids == IMAGE).long()}
    if name == "mistral3":
        pixels["image_sizes"] = torch.tensor([[16, 16]] * rows)
    return {"input_ids": ids, "attention_mask": mask, **pixels, **types}


@pytest.mark.parametrize("name", WRAPPERS)
def test_image_targets_draft_losslessly(name):
    target = make_wrapper(name)
    draft = make_draft(target)
    options = {"max_new_tokens": 30, "do_sample": False}
    if name == "gemma4":  # the text of a random one is a single token, again and again
        options["repetition_penalty"] = 3.0
    for rows in (1, 3):
        with_image = picture(name, rows)
        text = {"input_ids": with_image["input_ids"] % 80, "attention_mask": with_image["attention_mask"]}
        texts = []
        for inputs in (text, with_image):
            expected = target.generate(**inputs, **options)
            draft = scripted(draft, expected, error_rate=0.15, seed=3)
            output = target.generate(**inputs, **options, assistant_model=draft, return_dict_in_generate=True)
            assert torch.equal(output.sequences, expected)
            lengths = {n for row in output.acceptance_lengths for n in row}
            assert len(lengths) >= 3, lengths
            texts.append(expected[:, 14:])
        assert not torch.equal(*texts), "the image changes nothing"
