"""A drafter on another device than its target: no operation meets tensors of both."""

import pytest
import torch
from support.cuda_driver import needs_driver
from support.pairs import make_draft, make_target
from support.scripted_draft import scripted
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from dflash_hf.decoding.acceptance import Acceptance
from dflash_hf.decoding.draft_session import DraftSession
from dflash_hf.decoding.session import SlotSession
from dflash_hf.decoding.trees import draft_tree
from dflash_hf.targets.features import FeatureTap


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
PAIRS = [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]


class WithoutGuard(TorchFunctionMode):
    """A few methods of tensors ask for a CUDA that is not there, even of tensors without data; operators do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return part(*args)
        if func is torch.Tensor.__setitem__:
            return torch.ops.aten.copy_(part(args[0], args[1]), args[2])
        if func is torch.Tensor.contiguous:
            return args[0].clone()
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not(args[0])
        return func(*args, **(kwargs or {}))


def part(tensor, index):
    """`tensor[index]` in operators."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        at = next(place for place, i in enumerate(index) if i is Ellipsis)
        rest = tensor.dim() - sum(i is not None for i in index) + 1
        index[at : at + 1] = [slice(None)] * rest
    dim = 0
    for i in index:
        if isinstance(i, int):
            tensor = tensor.select(dim, i)
            continue
        if i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, i.start, i.stop, i.step or 1)
        else:
            tensor = tensor.index_select(dim, i.flatten()).unflatten(dim, i.shape)
            dim += i.dim() - 1
        dim += 1
    return tensor


def pretended(model, device):
    """The model with tensors that have a shape and a device, and no data."""
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                empty = torch.empty(value.shape, dtype=value.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
        for name, value in list(module._buffers.items()):
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
    return model


HEADS = {
    "dflash": {},
    "dflash 2": DFLASH2,
    "vanilla": {"markov_rank": 6, "enable_confidence_head": True},
    "rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
}


@needs_driver
@pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("target_device", "draft_device"), PAIRS)
def test_every_tensor_is_where_it_is_used(target_device, draft_device, fields, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("devices are pretended where there is none; see the test of real ones")
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [7, 5])  # the lengths of the prompts
    target = make_target("gemma3")
    draft = make_draft(target, **fields)
    with FakeTensorMode(), WithoutGuard():
        target = pretended(target, target_device)
        draft = pretended(draft, draft_device)
        ids = torch.ones(2, 7, dtype=torch.long, device=target_device)
        offset = torch.zeros(2, 1, dtype=torch.long, device=target_device)
        drafter = DraftSession(draft, target)
        cache = DynamicCache(config=target.config)
        with FeatureTap(target, draft.config.target_layer_ids, consume=drafter.context.append) as tap, tap.running():
            target(input_ids=ids, past_key_values=cache)
            tap.consume = None
            drafter.context.prefill([0, 2], 7, offset)
            session = SlotSession(target, cache, [0, 2], offset, {}, tap)
            anchors = torch.ones(2, dtype=torch.long, device=target_device)
            block = drafter.draft_block(anchors)
            logits, features = session.verify(block)
            session.keep(Acceptance.from_counts([2, 3]))
            drafter.context.read(features, Acceptance.from_counts([2, 3]))
            grown = draft_tree(drafter, anchors, nodes=6)
            after, features = session.verify(grown)
            counts, path = grown.longest_match(after.argmax(dim=-1))
            acceptance = Acceptance([[0, 1], [0]], counts, path)
            session.keep(acceptance)
            drafter.context.read(acceptance.select(features), acceptance)
    for tensor in (block.tokens, logits, *grown[:5], after, path, counts):
        assert tensor.device == torch.device(target_device)
    assert drafter.context.cache.layers[0].keys.device == torch.device(draft_device)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize("fields", [{}, DFLASH2], ids=["dflash", "dflash 2"])
@pytest.mark.parametrize(("target_device", "draft_device"), PAIRS[1:])
def test_drafting_across_real_devices_is_lossless(target_device, draft_device, fields, nodes):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    target = make_target("gemma3").to(target_device)
    draft = make_draft(target, **fields).to(draft_device)
    draft.decoding_config.tree_nodes = nodes
    ids = torch.tensor([[5, 9, 17, 33, 5, 9, 17], [0, 0, 17, 33, 5, 9, 17]], device=target_device)
    mask = (ids > 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    expected = target.generate(ids, **options)
    draft = scripted(draft, expected)
    output = target.generate(ids, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert max(n for row in output.acceptance_lengths for n in row) > 1
    texts = []
    for assistant in (None, draft):
        torch.manual_seed(0)
        texts.append(target.generate(ids, **{**options, "do_sample": True}, assistant_model=assistant))
    assert torch.equal(*texts)
