"""One process of a run on two nodes, each of which is this machine under another name."""

import faulthandler
import json
import sys
import time
from pathlib import Path

from dflash_hf.training import feature_store, train
from dflash_hf.training.recipe import read_recipe
from dflash_hf.training.train import leave_group
from support.runs import as_settings


def main(settings):
    """Train, storing features as slowly as asked, and write down what this process did."""
    faulthandler.dump_traceback_later(240, exit=True)  # before the test gives up: where it hangs
    wanted = json.loads(settings)
    stored = []
    target_forward = feature_store.target_forward

    def forward(*arguments, **options):
        time.sleep(wanted["delay"])
        stored.append(1)
        return target_forward(*arguments, **options)

    feature_store.target_forward = forward
    trainer = train.train(*read_recipe(None, as_settings(wanted["recipe"])))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    held_out = [line for line in trainer.state.log_history if "held_out_loss" in line]
    facts = {
        "stored": len(stored),
        "losses": losses,
        "rows": len(trainer.train_dataset),
        "held_out": held_out[-1]["held_out_simulated_tau"],
    }
    del trainer  # its model holds the group
    leave_group()
    facts["threads"] = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    Path(wanted["result"]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
