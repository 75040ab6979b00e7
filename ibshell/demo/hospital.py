"""The tenant's program, as each hospital's site agent starts it: train on this hospital's patients, hand in the result.

What federation costs a training script is the import, `fed.join()`, the loop and `round.submit`.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import fedpool.client as fed
from ibshell.demo import model


def main() -> None:
    """Train until the plan ends."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    patients = np.load(arguments.parse_args().data / "patients.npz")
    x, y = patients["x"], patients["y"]
    with fed.join() as federation:
        epochs, rate = int(federation.config["epochs"]), float(federation.config["rate"])
        for round in federation:  # noqa: A001 -- the word of the interface
            params = model.train(round.params, x, y, epochs, rate)
            loss = model.loss(params, x, y)
            # Only for the demo's report: what this hospital's true update looks like, beside what the hub sees of it.
            update = params["hidden.bias"][:8] - round.params["hidden.bias"][:8]
            Path("true-update.json").write_text(
                json.dumps({"round": round.number, "update": [float(v) for v in update]})
            )
            round.submit(params, weight=len(y), metrics={"loss": loss})


if __name__ == "__main__":
    main()
