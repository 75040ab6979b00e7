"""What Flower's own strategies make of a few rounds of updates: the values that ours are checked against.

    make peers
    .venv-peers/flower/bin/python tests/bench/peers/flower_strategies.py > tests/unit/flower_strategies.json

One site with weight 1 sends global + update each round, so the aggregate is that; every strategy starts from the same values.
"""

import json

import numpy as np
from flwr.common import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity

ROUNDS, VALUES = 5, 12

rng = np.random.default_rng(7)
INITIAL = rng.normal(0, 1, VALUES).astype(np.float32)
UPDATES = [(rng.normal(0, 0.1, VALUES)).astype(np.float32) for _ in range(ROUNDS)]
CASES = {
    "fedavg": (FedAvg, {}, {}),
    "fedavgm": (FedAvgM, {"server_learning_rate": 0.8, "server_momentum": 0.7}, {}),
    "fedadam": (FedAdam, {"eta": 0.05, "beta_1": 0.9, "beta_2": 0.99, "tau": 0.001}, {}),
    "fedyogi": (FedYogi, {"eta": 0.05, "beta_1": 0.9, "beta_2": 0.99, "tau": 0.001}, {}),
}


class OneNode:
    """As much of a grid as a strategy asks of it."""

    def get_node_ids(self):
        return [1]


def reply(values):
    """What a client sends."""
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(values)}), "metrics": metrics}), reply_to=message)


def main():
    """Print one JSON object."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    answer = {"initial": INITIAL.tolist(), "updates": [u.tolist() for u in UPDATES], "strategies": {}}
    for name, (kind, options, _) in CASES.items():
        strategy = kind(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1, **options)
        values, after = INITIAL, []
        if name == "fedavgm":
            strategy.current_arrays = ArrayRecord({"w": Array(values)})
        for number, update in enumerate(UPDATES, 1):
            record = ArrayRecord({"w": Array(values)})
            list(strategy.configure_train(number, record, ConfigRecord(), OneNode()))
            result, _ = strategy.aggregate_train(number, [reply(values + update)])
            values = np.asarray(result["w"].numpy(), np.float32)
            after.append(values.tolist())
        answer["strategies"][name] = {"options": options, "after": after}
    print(json.dumps(answer))


main()
