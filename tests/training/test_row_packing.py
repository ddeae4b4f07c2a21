"""Several documents in one row: each trains as if it were alone."""

import pytest
import torch
from support.pairs import make_draft, make_target
from support.rows import counting_rows, uneven_rows
from support.runs import BLOCK, PLAIN_SGD, history, make_trainer

from dflash_hf.data.examples import DFlashCollator, document_positions, pack
from dflash_hf.target import target_features


def test_packing_splits_no_example_and_loses_none():
    lengths = [10, 3, 7, 12, 2, 25, 6, 6, 1, 4]
    examples = [{"input_ids": [i] * n, "loss_mask": [0] + [1] * (n - 1)} for i, n in enumerate(lengths)]
    rows = list(pack(examples, 12))
    assert sum(len(row["input_ids"]) for row in rows) == sum(lengths)
    assert max(len(row["input_ids"]) for row in rows) == 25  # the example that is longer than a row
    unpacked = []
    for row in rows:
        ids, mask, documents = (row[name] for name in ("input_ids", "loss_mask", "document_ids"))
        assert len(ids) == len(mask) == len(documents)
        assert documents == sorted(documents) and set(documents) == set(range(documents[-1] + 1))
        for document in range(documents[-1] + 1):
            places = [j for j, one in enumerate(documents) if one == document]
            unpacked.append({"input_ids": [ids[j] for j in places], "loss_mask": [mask[j] for j in places]})
    assert sorted(unpacked, key=lambda row: row["input_ids"][0]) == examples
    assert len(rows) == 6  # 76 tokens, 25 of them in one row


def test_rows_are_full_when_there_are_many():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (2000,), generator=generator).tolist()
    rows = list(pack([{"input_ids": [1] * n, "loss_mask": [1] * n} for n in lengths], 512))
    assert sum(lengths) / (512 * len(rows)) > 0.97


def test_positions_start_again_with_each_document():
    batch = DFlashCollator()([*pack(counting_rows(2, 5), 10), counting_rows(1, 7)[0]])
    assert batch["document_ids"].tolist() == [[0] * 5 + [1] * 5, [0] * 7 + [-1] * 3]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4] * 2, [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]
    assert torch.equal(document_positions(batch["document_ids"]), batch["position_ids"])
    assert "position_ids" not in DFlashCollator()(counting_rows(2))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3", "gpt2"])
def test_features_of_packed_documents_are_those_of_documents_alone(family):
    target = make_target(family, dtype=torch.float64)
    examples = counting_rows(3, 20)
    batch = DFlashCollator()(list(pack(examples, 40)))
    packed = target_features(target, [0, 2], batch["input_ids"], position_ids=batch["position_ids"])
    alone = [target_features(target, [0, 2], torch.tensor([row["input_ids"]]))[0] for row in examples]
    found = [packed[0, :20], packed[0, 20:], packed[1, :20]]
    # The order in which rows are filled is not the order of the examples.
    for features in found:
        assert min((features - one).norm() / one.norm() for one in alone) < 1e-6


@pytest.mark.parametrize("loss_type", ["ce", "dpace", "kl"])
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_the_loss_of_packed_documents_is_that_of_documents_alone(layers, loss_type, tmp_path):
    """With the same anchors, and with other text before each document than nothing."""
    target = make_target(dtype=torch.float64)
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    draft = make_draft(target, block_size=BLOCK, **(window if layers == "sliding" else {}))
    trainer = make_trainer(tmp_path, target, uneven_rows(), draft, num_anchors=64, loss_type=loss_type)

    def loss(rows):
        batch = trainer.data_collator(rows)
        trainer.objective.draw_anchors(batch, step=0)  # as many as there are, hence the same for both
        weight = trainer.objective.normalizer(batch)
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, batch).item(), weight.item(), batch["valid"].sum().item()

    alone = loss(uneven_rows())
    packed = list(pack(uneven_rows(), 40))
    assert len(packed) == 2
    assert loss(packed) == pytest.approx(alone, rel=1e-6)
    assert loss(list(pack(uneven_rows(), 100))) == pytest.approx(alone, rel=1e-6)
    leaking = [{name: row[name] for name in ("input_ids", "loss_mask")} for row in packed]
    assert loss(leaking)[0] != pytest.approx(alone[0], rel=1e-4)


def test_packed_rows_train(tmp_path):
    target = make_target(dtype=torch.float64)
    losses = []
    for rows in (counting_rows(4), list(pack(counting_rows(4), 48))):
        size = {"per_device_train_batch_size": len(rows), "num_anchors": 64}
        trainer = make_trainer(tmp_path, target, rows, **size, **PLAIN_SGD)
        trainer.train()
        losses += history(trainer, "loss")
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_target_that_mixes_documents_is_refused(tmp_path):
    """The recurrent state of linear attention runs on into the next document."""
    target = make_target("qwen3_next")
    rows = list(pack(counting_rows(4), 48))
    trainer = make_trainer(tmp_path, target, rows, make_draft(target, block_size=BLOCK))
    with pytest.raises(ValueError, match="packing=True, but in Qwen3NextForCausalLM"):
        trainer.train()
