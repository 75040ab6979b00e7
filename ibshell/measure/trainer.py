"""The tenant's program of the rounds' measurement: it moves every parameter a little and hands the result in."""

import numpy as np

import fedpool.client as fed

STEP = np.float32(0.25)


def main() -> None:
    """Train until the plan ends."""
    with fed.join() as federation:
        for round in federation:  # noqa: A001 -- the word of the interface
            for values in round.params.values():
                values += STEP  # the arrays are private to this program
            round.submit(round.params, weight=1)


if __name__ == "__main__":
    main()
