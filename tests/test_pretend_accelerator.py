"""What the pretend accelerator of `support.pretend` sees, and what its CUDA graphs replay."""

import copy
from pathlib import Path

import pytest
import torch
from support.pretend import PretendAccelerator
from torch import nn


# What a function of `x`, `[2, 3]` on a device, asks for: kernels, copies from the host, copies to the host, waits.
REQUESTS = {
    "view": (lambda x: x[1:, None].transpose(0, 2), (0, 0, 0, 0)),
    "sum": (lambda x: x + 1.0, (1, 0, 0, 0)),
    "factory": (lambda x: torch.arange(3, device=x.device), (1, 0, 0, 0)),
    "factory like": (lambda x: x.new_zeros(2), (1, 0, 0, 0)),
    "uninitialised": (lambda x: torch.empty_like(x), (0, 0, 0, 0)),
    "empty result": (lambda x: torch.cat([x[:0], x[:0]]), (0, 0, 0, 0)),
    "same device": (lambda x: x.to("cuda"), (0, 0, 0, 0)),
    "other dtype": (lambda x: x.to("cuda:0", torch.float16), (1, 0, 0, 0)),
    "tensor of a list": (lambda x: torch.tensor([1, 2], device=x.device), (0, 1, 0, 1)),
    "new tensor": (lambda x: x.new_tensor([1, 2]), (0, 1, 0, 1)),
    "empty list": (lambda x: x.new_tensor([]), (0, 0, 0, 0)),
    "copied from the host": (lambda x: torch.ones(2).to(x), (0, 1, 0, 1)),
    "written from the host": (lambda x: x.copy_(torch.ones(2, 3)), (0, 1, 0, 1)),
    "copied to the host": (lambda x: x.cpu(), (0, 0, 1, 1)),
    "list": (lambda x: x.tolist(), (0, 0, 1, 1)),
    "number": (lambda x: float(x[0, 0]), (0, 0, 1, 1)),
    "truth": (lambda x: bool((x > 0).all()), (2, 0, 1, 1)),
    "bound of a slice": (lambda x: x[: x[0, 0].long()], (1, 0, 1, 1)),
    "equal": (lambda x: torch.equal(x, x + 1), (2, 0, 0, 1)),
    "nonzero": (lambda x: x.nonzero(), (1, 0, 0, 1)),
    "index": (lambda x: x[x[0].long() * 0], (3, 0, 0, 0)),
    "list as index": (lambda x: x[[0, 1, 0]], (1, 1, 0, 1)),
    "two lists as index": (lambda x: x[range(2), [0, 1]], (1, 2, 0, 2)),
    "boolean index": (lambda x: x[x > 0], (2, 0, 0, 1)),
    "number to a slice": (lambda x: x[0].__setitem__(slice(1), 3.0), (1, 0, 0, 0)),
    "number to an element": (lambda x: x.__setitem__((0, 1), 3.0), (0, 1, 0, 1)),
    "number to a mask": (lambda x: x.__setitem__(x > 0, 3.0), (2, 0, 0, 0)),
    "choice of a number": (lambda x: torch.where(x > 0, x, 1.0), (3, 0, 0, 0)),
    "number of the host": (lambda x: x * torch.tensor(2.0), (1, 0, 0, 0)),
    "repeated": (lambda x: x.repeat_interleave(2, dim=0), (1, 0, 0, 0)),
    "sampled": (lambda x: torch.multinomial(x, 1), (1, 0, 0, 0)),
    "asynchronous": (lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True), (0, 1, 0, 0)),
    "pinned, not asynchronous": (lambda x: torch.ones(2).pin_memory().to(x.device), (0, 1, 0, 1)),
    "asynchronous, not pinned": (lambda x: torch.ones(2).to(x.device, non_blocking=True), (0, 1, 0, 1)),
    "asynchronous to the host": (lambda x: x.to("cpu", non_blocking=True), (0, 0, 1, 0)),
    "linear": (lambda x: nn.functional.linear(x, x, x[:, 0]), (1, 0, 0, 0)),
    "linear in inference mode": (torch.inference_mode()(lambda x: nn.functional.linear(x, x, x[:, 0])), (1, 0, 0, 0)),
}


@pytest.mark.parametrize("function,expected", REQUESTS.values(), ids=REQUESTS)
def test_requests_are_counted(function, expected):
    with PretendAccelerator() as accelerator:
        x = torch.ones(2, 3).to("cuda")
        before = accelerator.counts.copy()
        function(x)
        counts = accelerator.counts.since(before)
    names = ("kernels", "from_host", "to_host", "waits")
    assert tuple(getattr(counts, name).total() for name in names) == expected


def test_counts_name_the_calling_line():
    with PretendAccelerator() as accelerator:
        x = torch.ones(3, device="cuda")
        nn.functional.relu(x).sum().item()
    (line,) = accelerator.counts.waits
    file, _, number = line.partition(":")
    assert file == "tests/test_pretend_accelerator.py"
    assert ".item()" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_uncounted_files_leave_no_trace():
    with PretendAccelerator(uncounted=["test_pretend_accelerator.py"]) as accelerator:
        torch.ones(3).to("cuda").sum().item()
    assert not accelerator.counts.kernels and not accelerator.counts.waits


MIXED = {
    "host": lambda x, y: x + torch.ones(3),
    "two devices": lambda x, y: x + y,
    "concatenation": lambda x, y: torch.cat([x, y]),
    "index of the device": lambda x, y: torch.ones(3)[x.long()],
    "index of another device": lambda x, y: x[y.long()],
    "embedding": lambda x, y: nn.functional.embedding(torch.ones(2, dtype=torch.long), x[:, None]),
    "array": lambda x, y: x.numpy(),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED)
def test_mixed_devices_are_rejected(function):
    with PretendAccelerator(devices=2):
        x = torch.ones(3, device="cuda:0")
        y = torch.ones(3, device="cuda:1")
        with pytest.raises((RuntimeError, TypeError), match="same device|cuda:0 device type"):
            function(x, y)
        assert (x + y.to("cuda:0")).tolist() == [2.0] * 3


def test_results_are_where_they_are_computed():
    with PretendAccelerator(devices=2):
        model = nn.Linear(3, 3).to("cuda:1")
        x = torch.ones(2, 3, device="cuda:1")
        on_device = (model(x), x[0], x.view(-1), copy.deepcopy(x), torch.zeros_like(x), x.unbind()[1], model.weight)
        assert {tensor.device for tensor in on_device} == {torch.device("cuda:1")}
        assert all(tensor.is_cuda and not tensor.is_cpu for tensor in on_device)
        on_host = (x.cpu(), x.new_zeros(2, device="cpu"), torch.tensor(x[0].tolist()), model.to("cpu").weight)
        assert {tensor.device for tensor in on_host} == {torch.device("cpu")}
        with torch.device("cuda:1"):
            assert torch.zeros(2).device == torch.device("cuda:1")
        assert x.to("meta").device.type == "meta"


def test_lists_are_copied_across_devices():
    """Each tensor of a list is on its own device: those of a target's layers that are split."""
    with PretendAccelerator(devices=2) as accelerator:
        lists = [[torch.full((3,), value, device=f"cuda:{i}") for i in range(2)] for value in (0.0, 1.0)]
        before = accelerator.counts.copy()
        torch._foreach_copy_(*lists)
        assert accelerator.counts.since(before).kernels.total() == 2
        assert [tensor.tolist() for tensor in lists[0]] == [[1.0] * 3] * 2


def test_leaving_restores_torch():
    names = [(torch, "Generator"), (torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "default_generators")]
    names += [(torch.cuda, "synchronize"), (torch.cuda, "current_device"), (torch.cuda, "manual_seed_all")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(KeyError), PretendAccelerator():
        x = torch.ones(3, device="cuda")
        raise KeyError
    assert [getattr(owner, name) for owner, name in names] == before
    assert x.device == torch.device("cpu") and (x + torch.ones(3)).tolist() == [2.0] * 3
    assert torch.ones(2).untyped_storage() is not None and not hasattr(torch.ones(2).untyped_storage(), "pretend_mark")


def test_generators_follow_the_seed():
    with PretendAccelerator(devices=2):
        probabilities = torch.full((4, 90), 1 / 90)
        torch.manual_seed(5)
        expected = torch.multinomial(probabilities, 1)
        for device in ("cuda:0", "cuda:1"):
            assert torch.equal(torch.multinomial(probabilities.to(device), 1).cpu(), expected)
        generator = torch.Generator("cuda:1")
        generator.set_state(torch.cuda.default_generators[1].get_state())
        assert generator.device == torch.device("cuda:1")
        drawn = [torch.empty(3, device="cuda:1").exponential_(generator=g) for g in (generator, None)]
        assert torch.equal(*drawn)


def test_memory_is_read_after_it_arrived():
    with PretendAccelerator() as accelerator:
        x = torch.arange(3, device="cuda")
        buffer = torch.zeros(3, dtype=torch.long, pin_memory=True)
        buffer.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        assert not accelerator.counts.waits
        with pytest.raises(RuntimeError, match="wait for it first"):
            buffer.tolist()
        with pytest.raises(RuntimeError, match="wait for it first"):
            buffer + 1
        event.synchronize()
        assert buffer.tolist() == [0, 1, 2] and accelerator.counts.waits.total() == 1


class Rounds:
    """A program that adds to a buffer in each round."""

    def __init__(self):
        self.buffer = torch.zeros(4, device="cuda")
        self.length = 0
        self.steps = torch.arange(4, device="cuda")
        self.place = torch.zeros(1, dtype=torch.long, device="cuda")

    def replayable(self):
        """Everything is on the device, and stays where it is."""
        self.buffer.index_add_(0, self.place, (self.steps[:1] + 1).float())
        self.place.add_(1)
        return self.buffer * 2

    def from_host(self):
        self.buffer.index_add_(0, torch.tensor([self.length], device="cuda"), torch.ones(1, device="cuda"))
        self.length += 1

    def moving(self):
        self.buffer = self.buffer + 1

    def waiting(self):
        if self.buffer[0] < 9:
            self.buffer.add_(1)

    def counting(self):
        self.buffer[: self.length + 1].add_(1)
        self.length += 1

    def adding_a_number(self):
        self.buffer.add_(self.length)
        self.length += 1

    def branching(self):
        self.length += 1
        return self.buffer + 1 if self.length % 2 else self.buffer.exp().log()


def captured(program: Rounds, method: str) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        getattr(program, method)()
    finally:
        graph.capture_end()
    return graph


@pytest.mark.parametrize("method", ["replayable", "moving", "counting", "adding_a_number"])
def test_graph_repeats_what_was_captured(method):
    """Where the program does something else in each round, or at another place, replays are not its rounds."""
    with PretendAccelerator():
        program = Rounds()
        for _ in range(3):
            getattr(program, method)()
        replayed = Rounds()
        buffer = replayed.buffer
        graph = captured(replayed, method)
        assert buffer.tolist() == [0, 0, 0, 0]  # nothing has run yet
        for _ in range(3):
            graph.replay()
        assert (buffer.tolist() == program.buffer.tolist()) == (method == "replayable")


def test_branch_of_the_host_is_captured_once():
    with PretendAccelerator():
        program = Rounds()
        graph = captured(program, "branching")
        assert len(graph.kernels) == 1 and graph.kernels[0].operator is torch.ops.aten.add.Tensor


@pytest.mark.parametrize(("method", "obstacle"), [("from_host", "from_host"), ("waiting", "waits")])
def test_graph_holds_no_waits_and_no_copies_from_the_host(method, obstacle):
    with PretendAccelerator():
        program = Rounds()
        with pytest.raises(RuntimeError, match=f"not permitted when stream is capturing: .*{obstacle}"):
            captured(program, method)
        captured(program, "replayable").replay()


def test_replay_is_one_launch():
    with PretendAccelerator() as accelerator:
        graph = captured(Rounds(), "replayable")
        before = accelerator.counts.copy()
        graph.replay()
    assert accelerator.counts.since(before).kernels.total() == 1


def test_result_of_a_capture_is_not_there_before_a_replay():
    with PretendAccelerator():
        program = Rounds()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        result = program.replayable()
        graph.capture_end()
        assert result.isnan().all()
        graph.replay()
        assert result.tolist() == [2, 0, 0, 0]
