"""What measuring in a run leaves behind: nothing, however many batches it reads."""

import pytest
from support.pairs import make_draft
from support.rows import counting_rows
from support.runs import BLOCK, make_trainer
from support.tiny_models import tiny_model
from support.watch import Watch


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("loss_type", ["ce", "kl"])
def test_evaluation_keeps_no_graph_and_no_memory(family, loss_type, tmp_path):
    """With a target as it is loaded, whose weights want gradients; the second has a state for each text."""
    target = tiny_model(family).requires_grad_(True)
    draft = make_draft(target, block_size=BLOCK)
    options = {"per_device_eval_batch_size": 1, "loss_type": loss_type}
    trainer = make_trainer(tmp_path, target, counting_rows(4), draft, counting_rows(24), **options)
    trainer.train()
    modules = [draft, target.get_decoder() if loss_type == "kl" else target.get_decoder().layers[0]]
    for module in modules:
        with Watch() as watch:
            watch.hook(module)
            assert trainer.evaluate()["eval_loss"] > 0
        assert not watch.graphs and len(watch.alive) == 24
        assert 0 < max(watch.alive) < 1.05 * max(watch.alive[:12])
    assert any(parameter.requires_grad for parameter in draft.parameters())
